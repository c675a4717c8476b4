/* libcuda.so.1 for tests: the part of CUDA's documented driver API that deploykit calls, without a GPU.
 *
 * Device memory is host memory. A stream runs nothing until somebody waits for it, so that a buffer read too early or
 * written too late shows as a wrong answer; new and freed memory is filled with 0xA5. Handles are never used twice.
 * A code after which CUDA's context is lost stays with the context. A call needs a current context; only an event and
 * the stream that it is recorded in must be of one. Semantics: CUDA Driver API reference, sections "Primary Context",
 * "Memory", "Stream", "Event" and "Graph Management"; CUDA C++ Programming Guide, "Stream and Event Behavior".
 *
 * FAKECUDA_DEVICES=1  FAKECUDA_TOTAL=bytes of each  FAKECUDA_INTEGRATED=0  FAKECUDA_WAIT_MS=0 for each wait
 * FAKECUDA_FAIL=cuMemAlloc:2,cuEventSynchronize:700@3   the next cuMemAlloc answers 2, the third wait 700
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
       INVALID_CONTEXT = 201, INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700,
       CONTEXT_IS_DESTROYED = 709, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURED_EVENT = 907,
       CAPTURE_WRONG_THREAD = 908 };
enum { MEMORY, HOST, STREAM, EVENT, GRAPH, EXEC, KINDS };
enum { GLOBAL, THREAD_LOCAL, RELAXED }; /* CUstreamCaptureMode */
enum { MOST_DEVICES = 8, POISON = 0xA5, MAPPED = 2 };
typedef void (*host_fn)(void *);

typedef struct op {
    struct op *next;
    void *to, *data; /* a copy, or the argument of `call` */
    const void *from;
    size_t count;
    host_fn call;
    uintptr_t event;
} op;
typedef struct { op *first, **end; } queue;
typedef struct { int device, holders, lost; size_t used; } context;
typedef struct object {
    struct object *next;
    uintptr_t id; /* of MEMORY and HOST the address */
    int kind, flags, capturing, mode, invalid;
    size_t size;
    context *owner;
    queue ops;
    pthread_t thread; /* that captures */
} object;

/* Recursive: Python may collect an engine of TensorRT, which gives its memory back, in a callback that runs under the lock. */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static context contexts[MOST_DEVICES];
static object *objects;
static uintptr_t last_id = 0x1000;
static int initialized, devices = 1, integrated, wait_ms, inside;
static size_t total = (size_t)1 << 30;
static char fails[512];
static long held[KINDS];
static __thread context *current;
static void drop(object *gone);

static long number(const char *name, long otherwise) { const char *s = getenv(name); return s && *s ? atol(s) : otherwise; }
static void forked(void) { initialized = 0; } /* CUDA does not survive fork() in the child */
static void configure(void) {
    const char *f = getenv("FAKECUDA_FAIL");
    devices = (int)number("FAKECUDA_DEVICES", 1);
    total = (size_t)number("FAKECUDA_TOTAL", 1L << 30);
    integrated = (int)number("FAKECUDA_INTEGRATED", 0);
    wait_ms = (int)number("FAKECUDA_WAIT_MS", 0);
    snprintf(fails, sizeof fails, "%s", f ? f : "");
    for (int n = 0; n < MOST_DEVICES; n++) contexts[n].device = n;
    pthread_atfork(NULL, NULL, forked);
}

/* what tests ask and tell */
void fakecuda_fail(const char *list) { pthread_once(&once, configure); pthread_mutex_lock(&lock); snprintf(fails, sizeof fails, "%s", list); pthread_mutex_unlock(&lock); }
void fakecuda_wait_ms(int ms) { pthread_once(&once, configure); wait_ms = ms; }
void fakecuda_lose(int device, int code) { contexts[device].lost = code; }
int fakecuda_lost(int device) { return contexts[device].lost; }
void fakecuda_total(size_t bytes) { total = bytes; }
size_t fakecuda_used(void) { return contexts[0].used; }
/* Memory of a library on device 0; negative: given back. 0: too little is free. */
int fakecuda_take(long bytes) {
    pthread_mutex_lock(&lock);
    int fits = bytes < 0 || (size_t)bytes <= total - contexts[0].used;
    if (fits) contexts[0].used += (size_t)bytes;
    pthread_mutex_unlock(&lock);
    return fits;
}
/* What a new process on such a machine finds; the bytes of old memory stay, as tests may still look at them. */
void fakecuda_machine(size_t bytes, int shared) {
    pthread_once(&once, configure);
    pthread_mutex_lock(&lock);
    while (objects) drop(objects);
    for (int n = 0; n < MOST_DEVICES; n++) contexts[n].lost = 0, contexts[n].used = 0;
    total = bytes, integrated = shared, wait_ms = fails[0] = 0;
    pthread_mutex_unlock(&lock);
}
long fakecuda_held(int kind) { return held[kind]; }
int fakecuda_holders(int device) { return contexts[device].holders; }

/* The code that a test wants of this call, else 0. */
static int injected(const char *name) {
    size_t length = strlen(name);
    for (char *at = fails; (at = strstr(at, name)); at += length) {
        if (at[length] != ':' || (at > fails && at[-1] != ',')) continue;
        char *end, *begin = at + length + 1;
        long code = strtol(begin, &end, 10), nth = *end == '@' ? strtol(end + 1, &end, 10) : 1;
        if (nth > 1) { /* counted down where it stands */
            char rest[sizeof fails];
            snprintf(rest, sizeof rest, "%s", end);
            snprintf(begin, sizeof fails - (size_t)(begin - fails), "%ld@%ld%s", code, nth - 1, rest);
            return OK;
        }
        memmove(at, *end == ',' ? end + 1 : end, strlen(*end == ',' ? end + 1 : end) + 1);
        return (int)code;
    }
    return OK;
}
static int sticky(int code) {
    switch (code) { /* after which every later call of the context fails (enum CUresult) */
    case 214: case 220: case 700: case 702: case 710: case 714: case 715: case 716: case 717: case 718: case 719: return 1;
    default: return 0;
    }
}

/* Ends the process as TensorRT for RTX 1.7 was seen to where a thread is inside while the libraries are unloaded. */
__attribute__((destructor)) static void unload(void) { if (__atomic_load_n(&inside, __ATOMIC_SEQ_CST)) abort(); }
/* A call that takes time and is no part of CUDA: another library's. */
void fakecuda_stay(int ms) {
    __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    usleep((useconds_t)ms * 1000);
    __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
}

/* Every call but those about errors and versions begins so; `needs`: a current context that is not lost. */
static int begin(const char *name, int needs) {
    pthread_once(&once, configure);
    pthread_mutex_lock(&lock);
    __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    int code = injected(name);
    if (code == OK && !initialized && strcmp(name, "cuInit")) code = NOT_INITIALIZED;
    if (code == OK && needs && !current) code = INVALID_CONTEXT;
    if (code == OK && needs && current->lost) code = current->lost;
    if (code == OK && needs && !current->holders) code = CONTEXT_IS_DESTROYED;
    if (current && sticky(code)) current->lost = code;
    return code;
}
static int end(int code) { __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST); pthread_mutex_unlock(&lock); return code; }
#define BEGIN(needs) do { int code_ = begin(__func__, needs); if (code_) return end(code_); } while (0)

static object *add(int kind, uintptr_t id) {
    object *o = calloc(1, sizeof *o);
    *o = (object){.next = objects, .id = id ? id : (last_id += 0x200), .kind = kind, .owner = current};
    held[kind]++;
    return objects = o;
}
static object *find(int kind, const void *id) {
    for (object *o = objects; o; o = o->next)
        if (o->kind == kind && o->id == (uintptr_t)id) return o;
    return NULL;
}
/* The block of this kind that holds all of these bytes. */
static object *block(int kind, const void *address, size_t count) {
    for (object *o = objects; o; o = o->next)
        if (o->kind == kind && o->id <= (uintptr_t)address && (uintptr_t)address + count <= o->id + o->size) return o;
    return NULL;
}
static void push(queue *q, op from) {
    op *o = malloc(sizeof *o);
    *o = from;
    o->next = NULL;
    if (!q->first) q->end = &q->first;
    *q->end = o;
    q->end = &o->next;
}
static void clear(queue *q) { for (op *o; (o = q->first);) { q->first = o->next; free(o); } }
static void drop(object *gone) {
    for (object **at = &objects; *at; at = &(*at)->next)
        if (*at == gone) { *at = gone->next; break; }
    held[gone->kind]--;
    clear(&gone->ops);
    free(gone);
}
int fakecuda_known(const void *address, size_t count) { return block(MEMORY, address, count) || block(HOST, address, count); }

/* Run the stream, up to an event if one is given. A copy to memory that is gone loses the context. */
static int run(object *stream, uintptr_t until) {
    for (op *o; (o = stream->ops.first);) {
        stream->ops.first = o->next;
        op done = *o;
        free(o);
        if (stream->owner->lost) continue;
        if (done.call) done.call(done.data);
        else if (done.event) { if (done.event == until) break; }
        else if (!fakecuda_known(done.to, done.count) || !fakecuda_known(done.from, done.count)) stream->owner->lost = ILLEGAL_ADDRESS;
        else memmove(done.to, done.from, done.count);
    }
    return stream->owner->lost;
}
static void run_device(context *owner) { for (object *o = objects; o; o = o->next) if (o->kind == STREAM && o->owner == owner) run(o, 0); }
/* CUDA forbids these while this thread captures, or any thread in the mode GLOBAL, and such a capture fails
 * (cuThreadExchangeStreamCaptureMode). */
static int forbidden(void) {
    int code = OK;
    for (object *o = objects; o; o = o->next)
        if (o->capturing && (o->mode == GLOBAL || (o->mode == THREAD_LOCAL && pthread_equal(o->thread, pthread_self())))) {
            o->invalid = 1;
            code = CAPTURE_UNSUPPORTED;
        }
    return code;
}
/* As long as the test wants a wait to take, without the lock. */
static void take_time(void) { pthread_mutex_unlock(&lock); if (wait_ms) usleep((useconds_t)wait_ms * 1000); pthread_mutex_lock(&lock); }

int cuInit(unsigned flags) { BEGIN(0); if (flags) return end(INVALID_VALUE); if (!devices) return end(NO_DEVICE); initialized = 1; return end(OK); }
int cuDriverGetVersion(int *version) { *version = (int)number("FAKECUDA_VERSION", 13000); return OK; }
int cuDeviceGetCount(int *count) { BEGIN(0); *count = devices; return end(OK); }
int cuDeviceGet(int *device, int ordinal) { BEGIN(0); if (ordinal < 0 || ordinal >= devices) return end(INVALID_DEVICE); *device = ordinal; return end(OK); }
int cuDeviceGetName(char *name, int length, int device) { BEGIN(0); if (device >= devices) return end(INVALID_DEVICE); snprintf(name, (size_t)length, "Test GPU %d", device); return end(OK); }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { BEGIN(0); /* FAKECUDA_UUIDS=a0,b1: a byte of each */
    const char *s = getenv("FAKECUDA_UUIDS");
    if (device >= devices) return end(INVALID_DEVICE);
    memset(uuid, s ? (int)strtol(s + 3 * device, NULL, 16) : device, 16);
    return end(OK); }
int cuDeviceGetAttribute(int *value, int attribute, int device) { BEGIN(0);
    if (device >= devices) return end(INVALID_DEVICE);
    switch (attribute) { /* enum CUdevice_attribute */
    case 16: *value = 132; break; /* MULTIPROCESSOR_COUNT */
    case 18: *value = integrated; break;
    case 75: *value = 9; break; /* COMPUTE_CAPABILITY_MAJOR */
    case 76: *value = 0; break;
    default: return end(INVALID_VALUE);
    }
    return end(OK); }
int cuDevicePrimaryCtxRetain(context **found, int device) { BEGIN(0); if (device < 0 || device >= devices) return end(INVALID_DEVICE); *found = &contexts[device]; contexts[device].holders++; return end(OK); }
int cuDevicePrimaryCtxRelease(int device) { BEGIN(0); if (!contexts[device].holders) return end(INVALID_CONTEXT); contexts[device].holders--; return end(OK); }
int cuCtxSetCurrent(context *wanted) { BEGIN(0); current = wanted; return end(OK); }
int cuCtxGetCurrent(context **found) { BEGIN(0); *found = current; return end(OK); }

int cuMemGetInfo(size_t *left, size_t *all) { BEGIN(1); *left = total - current->used; *all = total; return end(OK); }
int cuMemAlloc(void **address, size_t size) { BEGIN(1);
    int code = forbidden();
    if (code || !size) return end(code ? code : INVALID_VALUE);
    if (size > total - current->used) return end(OUT_OF_MEMORY);
    *address = aligned_alloc(512, (size + 511) / 512 * 512);
    memset(*address, POISON, size);
    add(MEMORY, (uintptr_t)*address)->size = size;
    current->used += size;
    return end(OK); }
int cuMemFree(void *address) { BEGIN(1);
    int code = forbidden();
    object *o = find(MEMORY, address);
    if (code || !o) return end(code ? code : INVALID_VALUE);
    run_device(o->owner); /* it waits for the device */
    o->owner->used -= o->size;
    memset(address, POISON, o->size);
    drop(o);
    free(address);
    return end(OK); }
int cuMemHostAlloc(void **address, size_t size, unsigned flags) { BEGIN(1);
    if (!size || flags > 7) return end(INVALID_VALUE);
    *address = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    memset(*address, POISON, size);
    object *o = add(HOST, (uintptr_t)*address);
    o->size = size, o->flags = (int)flags;
    return end(OK); }
int cuMemFreeHost(void *address) { BEGIN(1);
    object *o = find(HOST, address);
    if (!o) return end(INVALID_VALUE);
    memset(address, POISON, o->size);
    drop(o);
    free(address);
    return end(OK); }
int cuMemHostGetDevicePointer(void **found, void *address, unsigned flags) { BEGIN(1);
    object *o = block(HOST, address, 1);
    if (flags || !o || !(o->flags & MAPPED)) return end(INVALID_VALUE);
    *found = address;
    return end(OK); }

int cuStreamCreate(uintptr_t *stream, unsigned flags) { BEGIN(1); if (flags > 1) return end(INVALID_VALUE); *stream = add(STREAM, 0)->id; return end(OK); }
int cuStreamDestroy(void *stream) { BEGIN(1); object *o = find(STREAM, stream); if (!o) return end(INVALID_HANDLE); run(o, 0); drop(o); return end(OK); }
int cuStreamSynchronize(void *stream) { BEGIN(1);
    object *o = find(STREAM, stream);
    if (o && o->capturing) return o->invalid = 1, end(CAPTURE_UNSUPPORTED);
    take_time();
    o = find(STREAM, stream);
    return end(o ? run(o, 0) : INVALID_HANDLE);
}
int cuEventCreate(uintptr_t *event, unsigned flags) { BEGIN(1); if (flags > 7) return end(INVALID_VALUE); *event = add(EVENT, 0)->id; return end(OK); }
int cuEventDestroy(void *event) { BEGIN(1);
    object *o = find(EVENT, event);
    if (!o) return end(INVALID_HANDLE);
    drop(o);
    return end(OK); }
int cuEventRecord(void *event, void *stream) { BEGIN(1);
    object *e = find(EVENT, event), *s = find(STREAM, stream);
    if (!e || !s || e->owner != s->owner) return end(INVALID_HANDLE);
    if (s->capturing) e->capturing = 1;
    else e->capturing = 0, push(&s->ops, (op){.event = e->id});
    return end(OK); }
int cuEventSynchronize(void *event) { BEGIN(1);
    object *e = find(EVENT, event);
    if (!e) return end(INVALID_HANDLE);
    if (e->capturing) return end(CAPTURED_EVENT);
    take_time();
    for (object *s = objects; s; s = s->next) {
        int pending = 0;
        for (op *o = s->kind == STREAM ? s->ops.first : NULL; o; o = o->next) pending |= o->event == (uintptr_t)event;
        if (pending) run(s, (uintptr_t)event);
    }
    return end(e->owner->lost);
}

static int enqueue(void *stream, op what) {
    object *s = find(STREAM, stream);
    if (!s) return INVALID_HANDLE;
    if (s->invalid) return CAPTURE_INVALIDATED;
    push(&s->ops, what);
    return OK;
}
static int copy(void *to, const void *from, size_t count, void *stream, int to_kind, int from_kind) {
    object *a = block(to_kind, to, count), *b = block(from_kind, from, count);
    if (!a || !b) return INVALID_VALUE;
    return enqueue(stream, (op){.to = to, .from = from, .count = count});
}
int cuMemcpyHtoDAsync(void *to, const void *from, size_t count, void *stream) { BEGIN(1); return end(copy(to, from, count, stream, block(HOST, to, count) ? HOST : MEMORY, HOST)); }
int cuMemcpyDtoHAsync(void *to, const void *from, size_t count, void *stream) { BEGIN(1); return end(copy(to, from, count, stream, HOST, block(HOST, from, count) ? HOST : MEMORY)); }
int cuMemcpyDtoDAsync(void *to, const void *from, size_t count, void *stream) { BEGIN(1); return end(copy(to, from, count, stream, MEMORY, MEMORY)); }
int cuMemcpyDtoH(void *to, const void *from, size_t count) { BEGIN(1);
    int code = forbidden();
    if (!code && !block(MEMORY, from, count)) code = INVALID_VALUE;
    if (!code) memcpy(to, from, count);
    return end(code);
}
int cuLaunchHostFunc(void *stream, host_fn call, void *data) { BEGIN(1); return end(enqueue(stream, (op){.call = call, .data = data})); }

/* While a stream captures, its queue holds the graph to come: it was idle, or what was queued is run first. */
int cuStreamBeginCapture(void *stream, int mode) { BEGIN(1);
    object *s = find(STREAM, stream);
    if (!s) return end(INVALID_HANDLE);
    if (s->capturing || mode > RELAXED) return end(s->capturing ? ILLEGAL_STATE : INVALID_VALUE);
    run(s, 0);
    s->capturing = 1, s->mode = mode, s->invalid = 0, s->thread = pthread_self();
    return end(OK); }
int cuStreamEndCapture(void *stream, uintptr_t *graph) {
    *graph = 0;
    pthread_once(&once, configure);
    pthread_mutex_lock(&lock);
    __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    object *s = find(STREAM, stream);
    int wrong = s && s->capturing && !pthread_equal(s->thread, pthread_self());
    int code = injected(__func__), invalid = s ? s->invalid : 0, open = s && s->capturing && !wrong;
    queue ops = {0};
    if (open) { /* it ends, whatever else is wrong */
        s->capturing = s->invalid = 0;
        ops = s->ops, s->ops = (queue){0};
    }
    if (current && sticky(code)) current->lost = code;
    if (!code) code = !s ? INVALID_HANDLE : wrong ? CAPTURE_WRONG_THREAD : !open ? ILLEGAL_STATE : invalid ? CAPTURE_INVALIDATED : current->lost;
    if (code) return clear(&ops), end(code);
    object *g = add(GRAPH, 0);
    for (op *o = ops.first; o; o = o->next) push(&g->ops, *o);
    clear(&ops);
    *graph = g->id;
    return end(OK); }
static void append(queue *to, const queue *from) { for (op *o = from->first; o; o = o->next) push(to, *o); }
int cuGraphInstantiate(uintptr_t *exec, void *graph, unsigned long long flags) { BEGIN(1);
    object *g = find(GRAPH, graph);
    if (!g || flags) return end(INVALID_VALUE);
    object *e = add(EXEC, 0);
    append(&e->ops, &g->ops);
    *exec = e->id;
    return end(OK); }
int cuGraphDestroy(void *graph) { BEGIN(1); object *g = find(GRAPH, graph); if (!g) return end(INVALID_VALUE); drop(g); return end(OK); }
int cuGraphLaunch(void *exec, void *stream) { BEGIN(1);
    object *e = find(EXEC, exec), *s = find(STREAM, stream);
    if (!e || !s) return end(e ? INVALID_HANDLE : INVALID_VALUE);
    append(&s->ops, &e->ops);
    return end(OK); }
int cuGraphExecDestroy(void *exec) { BEGIN(1); object *e = find(EXEC, exec); if (!e) return end(INVALID_VALUE); drop(e); return end(OK); }

static const struct { int code; const char *text; } errors[] = {
    {OK, "no error"}, {INVALID_VALUE, "invalid argument"}, {OUT_OF_MEMORY, "out of memory"},
    {NOT_INITIALIZED, "initialization error"}, {NO_DEVICE, "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "invalid device ordinal"}, {INVALID_CONTEXT, "invalid device context"},
    {INVALID_HANDLE, "invalid resource handle"}, {ILLEGAL_ADDRESS, "an illegal memory access was encountered"},
    {719, "unspecified launch failure"}, {CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"}, {999, "unknown error"},
};
int cuGetErrorString(int code, const char **text) {
    *text = NULL;
    for (size_t n = 0; n < sizeof errors / sizeof *errors; n++)
        if (errors[n].code == code) return *text = errors[n].text, OK;
    return INVALID_VALUE;
}

#define F(name) {#name, (void *)name}
static const struct { const char *name; void *function; } functions[] = {
    F(cuInit), F(cuDriverGetVersion), F(cuDeviceGetCount), F(cuDeviceGet), F(cuDeviceGetName), F(cuDeviceGetAttribute),
    F(cuDevicePrimaryCtxRetain), F(cuDevicePrimaryCtxRelease), F(cuCtxSetCurrent), F(cuCtxGetCurrent), F(cuMemGetInfo),
    F(cuMemAlloc), F(cuMemFree), F(cuMemHostAlloc), F(cuMemFreeHost), F(cuMemHostGetDevicePointer), F(cuStreamCreate),
    F(cuStreamDestroy), F(cuStreamSynchronize), F(cuEventCreate), F(cuEventDestroy), F(cuEventRecord), F(cuEventSynchronize),
    F(cuMemcpyHtoDAsync), F(cuMemcpyDtoHAsync), F(cuMemcpyDtoDAsync), F(cuMemcpyDtoH), F(cuLaunchHostFunc),
    F(cuStreamBeginCapture), F(cuStreamEndCapture), F(cuGraphInstantiate), {"cuGraphInstantiateWithFlags", (void *)cuGraphInstantiate},
    F(cuGraphDestroy), F(cuGraphLaunch), F(cuGraphExecDestroy), F(cuGetErrorString),
};
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    *found = strcmp(name, "cuGetProcAddress") ? NULL : (void *)cuGetProcAddress_v2;
    for (size_t n = 0; n < sizeof functions / sizeof *functions; n++)
        if (!strcmp(functions[n].name, name)) *found = functions[n].function;
    if (status) *status = *found ? 0 : 1;
    return *found ? OK : NOT_FOUND;
}
