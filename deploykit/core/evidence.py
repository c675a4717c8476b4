"""Evidence: what was measured of an artefact and whether it passed, one class per kind of proof.

`Evidence` is part of every manifest. Each proof has `passed`, `why` and its figures, and where it
was made on data, the data's SHA-256. JSON has no infinity: a figure that is infinite is null there,
and comes back as infinity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from deploykit.core.errors import GateFailed
from deploykit.core.json_value import Record
from deploykit.core.task import Preprocess

# Two float32 programs differ by the rounding of each, and other kernels round elsewhere.
FLOAT32_MARGIN = 8.0
MOST = 0.1  # upper limit of a bound from `float32_error`: else two different models could pass


@dataclass(frozen=True)
class ParityRow(Record):
    """Difference of one output between two engines at one batch size; non-finite values left out.

    `error` is what a bound applies to: max |a-b| / max |a|, relative to the output's own `scale`,
    max |a|; where all of a is 0 and b is not, it is 1. It is infinite where `problem` says that no
    bound can be met: NaN, infinity on one side only, integers that differ. `float32_error`: what
    float32 itself gives, that is the same error of a against itself in float64 or in another batch;
    None where it was not measured.
    `max_rel`: max |a-b| / max(|a|, 1e-6). `sqnr_db`: signal to noise, infinite when equal.
    `agreement`: share of equal argmax over the classes, of samples, tokens or pixels, or of boxes
    that both found; `answers` says of which, and is empty where an output shows neither.
    `mean_iou`: of the classes of pixels, or of the boxes that both found. Boxes that only one of
    the two found are an `error` of their share. `finite`: every value of both sides is finite.
    `places_match`: NaN and the infinities are at the same places on both sides. `floating`: neither
    integers nor booleans.
    """

    output: str
    batch: int
    values: int
    max_abs: float
    max_rel: float
    rms: float
    sqnr_db: float
    agreement: float | None
    finite: bool
    error: float
    problem: str = ""
    places_match: bool = True
    floating: bool = True
    scale: float | None = None
    float32_error: float | None = None
    answers: str = ""
    mean_iou: float | None = None

    @property
    def zero(self) -> bool:
        """Whether every value is 0 on both sides, so that equality shows nothing."""
        return self.floating and self.values > 0 and self.scale == 0 and self.error == 0


@dataclass(frozen=True)
class Parity(Record):
    """Outputs of `b` compared with those of `a`, the reference; the bound is on `ParityRow.error`.

    A row's bound is `max_error`, or 8 times its `float32_error` where that is more, up to 0.1.
    `data_sha256`: of the file with the inputs; empty for seeded random ones.
    """

    a: str
    b: str
    rows: tuple[ParityRow, ...]
    max_error: float
    data_sha256: str = ""

    shown: ClassVar[tuple[str, ...]] = ("passed", "why")
    in_notebook = ("a", "b", "passed", "why", "rows")

    @property
    def worst(self) -> ParityRow:
        """The row with the largest error, among those above their bound if there are any."""
        return max(self.rows, key=lambda row: (row.error > self.bound(row), row.error))

    @property
    def passed(self) -> bool:
        return all(row.error <= self.bound(row) for row in self.rows)

    def bound(self, row: ParityRow) -> float:
        """Return the largest error that `row` may have."""
        return max(self.max_error, min(MOST, FLOAT32_MARGIN * (row.float32_error or 0.0)))

    @property
    def warnings(self) -> tuple[str, ...]:
        """One warning for each output whose equality shows nothing."""
        found = []
        for name in dict.fromkeys(row.output for row in self.rows):
            rows = [row for row in self.rows if row.output == name]
            what = "holds no value" if not any(row.values for row in rows) else "is 0 everywhere"
            if all(row.zero or not row.values for row in rows):
                found.append(f"output '{name}' {what} on these inputs: that shows nothing")
        return tuple(found)

    @property
    def why(self) -> str:
        """The worst row in one line."""
        worst = self.worst
        found = worst.problem or (
            f"error {worst.error:.3g} is {'within' if self.passed else 'above'} "
            f"{self.bound(worst):.3g}"
        )
        if (worst.float32_error or 0.0) > self.max_error and not worst.problem:
            found += f"; float32 itself gives {worst.float32_error:.3g}"
        where = f"against {self.a}: output '{worst.output}' at batch {worst.batch}"
        return "; ".join((f"{where}: {found}", *self.warnings))

    def raise_if_over(self) -> None:
        """Raise GateFailed naming the worst row unless every error is within the bound."""
        if not self.passed:
            hint = "error is max |a-b| / max |a|; see the other rows for where it begins"
            raise GateFailed(f"{self.b} {self.why}", hint=None if self.worst.problem else hint)


ADJUSTED_WALD = "adjusted Wald for paired proportions"


@dataclass(frozen=True)
class Interval(Record):
    """A measured value and its 95 % interval; the unit is in the name of what holds it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class Drop(Record):
    """A candidate's loss of score against a reference on the same `n` samples.

    `drop` is positive when the candidate is worse. `unit`: "pp", a difference of shares (0.01 is
    one percentage point); "%", perplexity's relative rise (0.01 is one per cent); "", the score's
    own unit. `lost` and `gained`: the samples on which the candidate's score is lower, and higher.
    `method`: how the interval of `drop` was made.
    """

    metric: str
    n: int
    reference: Interval
    candidate: Interval
    drop: Interval
    lost: int
    gained: int
    unit: str = "pp"
    method: str = ADJUSTED_WALD

    def describe(self) -> str:
        """Return, for people, "drop 0.4 pp, 0.1 to 0.7, n = 540" (pp: percentage points)."""
        digits, scale = (1 if self.n < 1000 else 2), (100 if self.unit else 1)
        value, low, high = (
            f"{round(part * 100, digits) + 0.0:.{digits}f}"  # + 0.0 turns -0.0 into 0.0
            if self.unit and abs(part) < 1000  # a perplexity has no upper bound
            else f"{part * scale:.3g}"
            for part in (self.drop.value, self.drop.low, self.drop.high)
        )
        what = f"{self.metric} rise" if self.unit == "%" else "drop"
        unit = f" {self.unit}" if self.unit else ""
        return f"{what} {value}{unit}, {low} to {high}, n = {self.n}"


LEAST_SEEN = 0.9  # share of an engine's operations whose type has to be known
MOST_WIDER = 0.1  # share that may run wider than asked: a builder takes its fastest kernel


@dataclass(frozen=True)
class Evaluation(Record):
    """Accuracy against the reference, and the decision. `why`: one line, why it passed or failed.

    `drop`: on labelled data. `agreement`: the share of samples with the same answer (the argmax of
    the first output with classes; for integers the value itself), None where no output has one.
    `samples`: how many were used, None for random inputs. `max_drop`: the bound that applied, None
    if none did.
    """

    parity: Parity
    drop: Drop | None
    agreement: Interval | None
    samples: int | None
    passed: bool
    why: str
    max_drop: float | None
    min_sqnr_db: float
    data_sha256: str = ""

    shown: ClassVar[tuple[str, ...]] = ("sqnr_db",)

    @property
    def sqnr_db(self) -> float | None:
        """The lowest SQNR of any floating output at any batch size; None if no output is floating.

        It is minus infinity where NaN is on either side, or infinity on one only.
        """
        rows = [row for row in self.parity.rows if row.floating]
        return min((-math.inf if row.problem else row.sqnr_db for row in rows), default=None)

    def describe(self) -> str:
        """Return for a table "drop 0.4 pp, 0.1 to 0.7, n = 540", or agreement and SQNR."""
        if self.drop is not None:
            return self.drop.describe()
        if any(row.problem for row in self.parity.rows if row.floating):
            return "NaN or infinity"
        parts = []
        if self.agreement is not None and self.samples is not None:
            share = self.agreement
            value, low, high = (f"{x * 100:.1f}" for x in (share.value, share.low, share.high))
            parts.append(f"agreement {value} %, {low} to {high}, n = {self.samples}")
        if self.sqnr_db is not None:
            equal = "equal outputs" if not self.parity.warnings else "outputs that are 0 everywhere"
            parts.append(equal if self.sqnr_db == math.inf else f"SQNR {self.sqnr_db:.1f} dB")
        return "; ".join(parts) + (" on random inputs" if self.samples is None else "")


@dataclass(frozen=True)
class Layer(Record):
    """One layer of an engine. `precision`: what it computes in, None where it is not known.

    `kind`: as the engine inspector names it ("CaskConvolution", "gemm", "Reformat"). `tactic`: the
    kernel that was chosen, by the name or the number that the inspector gives it.
    """

    name: str
    kind: str
    precision: str | None
    onnx_nodes: tuple[str, ...] = ()
    tactic: str = ""


@dataclass(frozen=True)
class AskedNode(Record):
    """A node of a graph, the precision that it asks for, and its operations at axes of size 1.

    `operations`: 2 per multiply-add; 0 where they are not known.
    """

    name: str
    precision: str
    operations: int


@dataclass(frozen=True)
class PrecisionReadBack(Record):
    """The types that an engine's layers compute in, by its inspector; `layers` None: not read back.

    `wider`: nodes that run wider than the graph asks. `shares`, `time_shares`: 0 to 1 by precision,
    of the layers and of their time. `seen`, `wider_share`: 0 to 1, of the operations of `asked`.
    `allow_wider`: the user takes any share of wider nodes.
    """

    layers: tuple[Layer, ...] | None
    wider: tuple[str, ...] = ()
    shares: Mapping[str, float] | None = None
    time_shares: Mapping[str, float] | None = None
    seen: float | None = None
    wider_share: float | None = None
    allow_wider: bool = False
    asked: tuple[AskedNode, ...] = ()

    shown: ClassVar[tuple[str, ...]] = ("passed", "why")

    @property
    def passed(self) -> bool:
        return self.known and not self.too_wide

    @property
    def known(self) -> bool:
        """Whether the precision of at least LEAST_SEEN of the operations is known."""
        return (self.seen or 0.0) >= LEAST_SEEN

    @property
    def too_wide(self) -> bool:
        """Whether a larger share runs wider than asked than a gate lets pass."""
        return (self.wider_share or 0.0) > MOST_WIDER and not self.allow_wider

    @property
    def why(self) -> str:
        if self.layers is None:
            return "the layers were not read back"
        wider = "; ".join(self.wider[:3])
        if wider and self.wider_share is not None:
            wider = f"{wider} ({self.wider_share:.1%} of the operations run wider than asked)"
        if self.too_wide or (wider and self.known):
            return wider
        if not self.known:
            return f"it is not known what {1 - (self.seen or 0):.1%} of the operations run in"
        return "every node runs as narrow as the graph asks"


@dataclass(frozen=True)
class CalibrationRecord(Record):
    """The data that set the scales; `passed`: no doubt about it.

    `method`: the calibrator. `sqnr_db`: where it was chosen, of the floating outputs with each
    calibrator against float32, on samples of these data. `smoothed`: the outputs of LayerNorms
    whose outliers SmoothQuant moved into the weights.
    """

    passed: bool
    why: str
    method: str
    samples: int
    data_sha256: str
    sqnr_db: Mapping[str, float] = field(default_factory=dict)
    smoothed: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return the calibrator and why it was chosen: "mse of SQNR 20.8 dB; percentile 15.7"."""
        tried = sorted(self.sqnr_db.items(), key=lambda item: -item[1])
        others = [f"{name} {each:.1f}" for name, each in tried if name != self.method]
        parts = [self.method]
        if others:
            parts = [f"{self.method}, SQNR {self.sqnr_db[self.method]:.1f} dB", ", ".join(others)]
        if self.smoothed:
            count = len(self.smoothed)
            parts.append(f"SmoothQuant at {count} LayerNorm{'s' * (count > 1)}")
        return "; ".join(parts)


@dataclass(frozen=True)
class QuantizeRecord(Record):
    """The options of `quantize`. `other_nodes`: the precision around int8, fp8 or weights."""

    to: str
    other_nodes: str = "fp32"
    runtime: str = "tensorrt"


@dataclass(frozen=True)
class SearchStep(Record):
    """One model that the search tried.

    `float32_nodes`: those kept in float32, most sensitive first; `elapsed_s`: since the search
    began. Where no model could be made, `cost_s` and `drop` are infinite and `why` is the reason.
    """

    precision: str
    float32_nodes: tuple[str, ...]
    passed: bool
    drop: float
    why: str
    cost_s: float
    elapsed_s: float


@dataclass(frozen=True)
class SearchRecord(Record):
    """The search of `auto`; `passed`: something narrower than float32 was kept.

    `stopped`: empty, "time budget" or "interrupted".
    """

    passed: bool
    why: str
    precision: str
    float32_nodes: tuple[str, ...]
    cost_s: float | None
    drop: float | None
    stopped: str
    notes: tuple[str, ...]
    steps: tuple[SearchStep, ...]

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the search; candidates that had passed are kept."""
        return self.stopped == "interrupted"


@dataclass(frozen=True)
class GoldenSamples(Record):
    """Recorded inputs and outputs in a file next to the artefact.

    `reference`: the runtime that answered. `max_error`: the largest error of a replay.
    """

    file: str
    sha256: str
    reference: str
    max_error: float


@dataclass(frozen=True)
class WeightsFile(Record):
    """The second file that a model above 2 GiB keeps its weights in."""

    file: str
    sha256: str


@dataclass(frozen=True)
class TrainingRecord(Record):
    """How a checkpoint was trained, and its score on the test split."""

    recipe: str
    metric: str
    samples: int
    score: Interval
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceRecord(Record):
    """The source of an export. `ran_pickle`: loading it ran code that was in the file.

    `model_class`: of a live module, whose `sha256` is that of its weights, or of a Hugging Face
    folder; with several files of weights, the hash of their hashes.
    """

    kind: str
    sha256: str
    ran_pickle: bool
    model_class: str | None = None
    arch: str | None = None
    arch_sha256: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExportRecord(Record):
    """How it was exported. `fallback`: why torch's newer exporter was not used."""

    exporter: str
    opset: int
    fallback: str | None = None
    profile: str | None = None
    preprocess: Preprocess | None = None


@dataclass(frozen=True)
class Problem(Record):
    """A node that a target cannot run; `node` is empty where it is the whole model."""

    node: str
    operator: str
    why: str


@dataclass(frozen=True)
class Preflight(Record):
    """The problems that the target's runtime is known to have with a graph."""

    profile: str
    problems: tuple[Problem, ...]

    shown: ClassVar[tuple[str, ...]] = ("passed", "why")

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def why(self) -> str:
        return "; ".join(f"{each.node}: {each.why}" for each in self.problems[:3])


@dataclass(frozen=True)
class BuildRecord(Record):
    """How an engine was built. `flags`: of the builder and the network, by name.

    `plugins`: the libraries that it needs to run, each path with its SHA-256.
    """

    profile: str
    flags: tuple[str, ...] = ()
    version_compatible: bool = False
    plugins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RowIndependence(Record):
    """Whether requests may be joined: no row's outputs depend on the rows next to it.

    `rows`: the numbers of rows that were run. `error`: the largest difference of a row alone and
    joined, relative to the largest value of the output.
    """

    passed: bool
    why: str
    rows: tuple[int, ...] = ()
    error: float = 0.0


@dataclass(frozen=True)
class Evidence(Record):
    """The proofs of one artefact; None: not examined.

    `source_graph`: the evidence of the graph that an engine was built from. `proven_on`: the GPUs
    with their TensorRT on which an engine was proven; empty for where it was built.
    """

    parity: Parity | None = None
    accuracy: Evaluation | None = None
    precision: PrecisionReadBack | None = None
    quantize: QuantizeRecord | None = None
    calibration: CalibrationRecord | None = None
    search: SearchRecord | None = None
    training: TrainingRecord | None = None
    source: SourceRecord | None = None
    export: ExportRecord | None = None
    preflight: Preflight | None = None
    build: BuildRecord | None = None
    batching: RowIndependence | None = None
    source_graph: Evidence | None = None
    golden: GoldenSamples | None = None
    weights: WeightsFile | None = None
    notes: tuple[str, ...] = ()
    proven_on: tuple[str, ...] = ()

    shown: ClassVar[tuple[str, ...]] = ("verified",)

    @property
    def wrong(self) -> str:
        """The reason, in one line, not to use the engine; empty if there is none."""
        if self.precision is not None and self.precision.too_wide:
            return self.precision.why
        # the evaluation of a quantized graph decides on the same parity, whose bound is float32's
        decides = self.accuracy is not None and self.accuracy.parity == self.parity
        proofs = (self.accuracy,) if decides else (self.parity, self.accuracy)
        return next((each.why for each in proofs if each and not each.passed), "")

    @property
    def verified(self) -> bool:
        """Whether the precisions were read back, the engine ran, and no proof failed."""
        read = self.precision is not None and self.precision.known
        return read and self.parity is not None and not self.wrong


@dataclass(frozen=True)
class Gate(Record):
    """A bound that the run had to meet."""

    name: str
    passed: bool
    detail: str
