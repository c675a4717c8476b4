/* The part of libnvidia-ml.so.1 that deploykit asks: one GPU, or with STUB=thor one that keeps most to itself. */
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { unsigned long long total, free, used; } memory_t;
enum { OK = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, LOST = 15 };

static int is(const char *kind) { const char *v = getenv("STUB"); return v && !strcmp(v, kind); }
static int hidden(void) { return is("thor") ? NOT_SUPPORTED : OK; }

int nvmlInitWithFlags(unsigned int flags) { (void)flags; return is("late") ? 9 /* driver not loaded */ : OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "stub"; }
int nvmlDeviceGetCount_v2(unsigned int *n) { *n = is("lost") ? 2 : 1; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **h) { *h = (void *)(unsigned long)(i + 1); return i ? LOST : OK; }
int nvmlDeviceGetUUID(void *d, char *s, unsigned int n) { (void)d; strncpy(s, "GPU-3f1c", n); return OK; }
int nvmlDeviceGetName(void *d, char *s, unsigned int n) { (void)d; strncpy(s, "NVIDIA H200", n); return OK; }
int nvmlDeviceGetUtilizationRates(void *d, utilization_t *u) { (void)d; u->gpu = 63; u->memory = 40; return OK; }
int nvmlDeviceGetMemoryInfo(void *d, memory_t *m) { (void)d; m->total = 150000000000ull; m->used = 1000000000ull; return hidden(); }
int nvmlDeviceGetPowerUsage(void *d, unsigned int *mw) { (void)d; *mw = 412500; return hidden(); }
int nvmlDeviceGetEnforcedPowerLimit(void *d, unsigned int *mw) { (void)d; *mw = 700000; return hidden(); }
int nvmlDeviceGetTotalEnergyConsumption(void *d, unsigned long long *mj) { (void)d; *mj = 12345678; return hidden(); }
int nvmlDeviceGetClockInfo(void *d, unsigned int type, unsigned int *mhz) { (void)d; *mhz = type == 1 ? 1755 : 2619; return hidden(); }
int nvmlDeviceGetTemperature(void *d, unsigned int s, unsigned int *c) { (void)d; (void)s; *c = 52; return hidden(); }
/* an older driver: only the old name */
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *r) { (void)d; *r = 0x1 | 0x4 | 0x40; return hidden(); }
