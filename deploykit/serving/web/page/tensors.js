// Tensors as the Open Inference Protocol sends them: little-endian bytes behind a JSON header.

const TYPES = { // datatype: [bytes, array, numpy]
  BOOL: [1, Uint8Array, "|b1"], UINT8: [1, Uint8Array, "|u1"], UINT16: [2, Uint16Array, "<u2"],
  UINT32: [4, Uint32Array, "<u4"], UINT64: [8, BigUint64Array, "<u8"], INT8: [1, Int8Array, "|i1"],
  INT16: [2, Int16Array, "<i2"], INT32: [4, Int32Array, "<i4"], INT64: [8, BigInt64Array, "<i8"],
  FP16: [2, Uint16Array, "<f2"], BF16: [2, Uint16Array, null], FP32: [4, Float32Array, "<f4"],
  FP64: [8, Float64Array, "<f8"],
};

export const size = (shape) => shape.reduce((a, b) => a * b, 1);

const scratch = new DataView(new ArrayBuffer(4));

function toHalf(value) {
  scratch.setFloat32(0, value);
  const bits = scratch.getUint32(0);
  const sign = (bits >>> 16) & 0x8000, exponent = ((bits >>> 23) & 0xff) - 112, fraction = bits & 0x7fffff;
  if (exponent <= 0) return sign | Math.round(Math.abs(value) * 2 ** 24);
  if (exponent >= 31) return sign | (Number.isNaN(value) ? 0x7e00 : 0x7c00);
  return sign | ((exponent << 10) + ((fraction + 0x1000) >> 13)); // a carry goes into the exponent: right
}

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

function fromBrain(bits) {
  scratch.setUint32(0, bits << 16);
  return scratch.getFloat32(0);
}

/** A tensor of zeros; for BYTES each element is an empty string, four zero bytes of length. */
export const zeros = (name, datatype, shape) =>
  ({ name, datatype, shape, bytes: new Uint8Array(size(shape) * (TYPES[datatype]?.[0] ?? 4)) });

/** Numbers as the bytes of `datatype`: FP32, FP16 or UINT8, the types of images. */
export function pack(values, datatype) {
  if (datatype === "FP16") return new Uint8Array(Uint16Array.from(values, toHalf).buffer);
  if (datatype === "UINT8") return Uint8Array.from(values, (v) => Math.min(255, Math.max(0, Math.round(v))));
  return new Uint8Array(Float32Array.from(values).buffer);
}

/** Bytes as numbers (or strings, for BYTES), in row-major order. */
export function unpack(bytes, datatype) {
  const own = bytes.slice(); // aligned
  if (datatype === "BYTES") {
    const view = new DataView(own.buffer), strings = [], decoder = new TextDecoder();
    for (let at = 0; at + 4 <= own.length;) {
      const length = view.getUint32(at, true);
      strings.push(decoder.decode(own.subarray(at + 4, at + 4 + length)));
      at += 4 + length;
    }
    return strings;
  }
  if (!TYPES[datatype]) throw new Error(`the page cannot read ${datatype}`);
  const values = Array.from(new TYPES[datatype][1](own.buffer));
  if (datatype === "FP16") return values.map(fromHalf);
  if (datatype === "BF16") return values.map(fromBrain);
  return typeof values[0] === "bigint" ? values.map(Number) : values;
}

/** A .npy file for this input: its bytes and shape; a missing batch axis is added. Throws an Error. */
export async function readNpy(file, input) {
  const all = new Uint8Array(await file.arrayBuffer());
  const view = new DataView(all.buffer);
  if (all.length < 12 || String.fromCharCode(...all.subarray(1, 6)) !== "NUMPY") throw new Error(`${file.name} is not a .npy file`);
  const long = all[6] >= 2; // the header's length has four bytes
  const start = (long ? 12 : 10) + (long ? view.getUint32(8, true) : view.getUint16(8, true));
  const header = new TextDecoder("latin1").decode(all.subarray(long ? 12 : 10, start));
  const dtype = /'descr':\s*'([^']*)'/.exec(header)?.[1];
  const axes = /'shape':\s*\(([^)]*)\)/.exec(header)?.[1];
  const wanted = TYPES[input.datatype]?.[2];
  if (dtype === undefined || axes === undefined) throw new Error(`${file.name}: its header cannot be read`);
  if (dtype !== wanted) throw new Error(`${file.name} holds ${dtype}, input ${input.name} is ${input.datatype} (${wanted ?? "no .npy type"})`);
  if (/'fortran_order':\s*True/.test(header)) throw new Error(`${file.name} is in column order: save np.ascontiguousarray(x)`);
  const shape = axes.split(",").map((axis) => axis.trim()).filter(Boolean).map(Number);
  if (shape.length === input.shape.length - 1) shape.unshift(1);
  const bytes = all.subarray(start);
  if (bytes.length !== size(shape) * TYPES[input.datatype][0]) throw new Error(`${file.name} is truncated`);
  return { name: input.name, datatype: input.datatype, shape, bytes };
}

async function post(model, headers, body) {
  const began = performance.now();
  const response = await fetch(`v2/models/${encodeURIComponent(model)}/infer`, { method: "POST", headers, body });
  const bytes = new Uint8Array(await response.arrayBuffer());
  const took = performance.now() - began;
  const length = Number(response.headers.get("Inference-Header-Content-Length") ?? bytes.length);
  const text = new TextDecoder().decode(bytes.subarray(0, length));
  let value;
  try { value = JSON.parse(text); } catch { throw new Error(`the server answered ${response.status}`); }
  if (!response.ok) throw new Error(value.error ?? `the server answered ${response.status}`);
  let at = length;
  const outputs = value.outputs.map((output) => {
    const count = output.parameters?.binary_data_size;
    if (count === undefined) return { ...output, values: output.data.flat(Infinity) };
    at += count;
    return { ...output, values: unpack(bytes.subarray(at - count, at), output.datatype) };
  });
  return { outputs, took };
}

/** Send tensors of bytes; gives {outputs, took}, the round trip in ms. Throws an Error. */
export function infer(model, headers, tensors) {
  const inputs = tensors.map(({ name, datatype, shape, bytes }) =>
    ({ name, datatype, shape, parameters: { binary_data_size: bytes.length } }));
  const head = new TextEncoder().encode(JSON.stringify({ inputs, parameters: { binary_data_output: true } }));
  const more = { "Inference-Header-Content-Length": String(head.length), "Content-Type": "application/octet-stream" };
  return post(model, { ...headers, ...more }, new Blob([head, ...tensors.map((tensor) => tensor.bytes)]));
}

export const inferJson = (model, headers, text) => post(model, { ...headers, "Content-Type": "application/json" }, text);
