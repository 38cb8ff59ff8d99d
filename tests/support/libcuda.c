/* A libcuda without a GPU that tells, a line of JSON a call, what it was given: for test_driver_calls.py, and, in the
   test's own process, for tests/runtime/driver. stub_fail lets one next call fail; OLDER is a driver of CUDA 12.0, which
   has no cuFuncLoad, TOO_OLD one of CUDA 11. VERSION is what it says that it is; NO_GPU has it say that there is none;
   and -DcuLaunchKernelEx=other takes that function out.

   The types are those of cuda.h, written out: a compiler lays them out and passes them as the driver's own does. */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    void *hStream;
    void *attrs;
    unsigned int numAttrs;
} CUlaunchConfig;

static char primary, module, function, memory[1 << 17], stream;
static void *current;
static int sizes[64], count, blocks_of_one = 2, code_of_next;
static char fails_next[64];

static void hex(const void *at, int bytes) {
    for (int i = 0; i < bytes; i++) printf("%02x", ((const unsigned char *)at)[i]);
}

void stub_parameters(int n, const int *each) {
    count = n;
    memcpy(sizes, each, n * sizeof *each);
}

void stub_blocks(int of_one) { blocks_of_one = of_one; }

void stub_without_context(void) { current = 0; }

void stub_fail(const char *call, int code) {
    snprintf(fails_next, sizeof fails_next, "%s", call);
    code_of_next = code;
}

#ifndef VERSION
#define VERSION 13010
#endif

static int failed(const char *call) {
    if (strcmp(call, fails_next)) return 0;
    fails_next[0] = 0;
    return code_of_next;
}

#ifdef NO_GPU
int cuInit(unsigned int flags) { return 100; }
#else
int cuInit(unsigned int flags) { return flags ? 1 : failed("cuInit"); }
#endif
int cuDeviceGetCount(int *n) { *n = 1; return failed("cuDeviceGetCount"); }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuGetErrorString(int error, const char **text) { *text = error == 201 ? "invalid device context" : error == 700 ? 0 : "?"; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal != 0; }
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Stub %d", device); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : -1;
    return device;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)141 << 30; return device; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &primary; return device; }
int cuCtxSetCurrent(void *context) { current = context; return context != &primary; }
int cuCtxPushCurrent_v2(void *context) { return context != &primary; }
int cuCtxPopCurrent_v2(void **context) { *context = &primary; return 0; }
#ifndef TOO_OLD
int cuThreadExchangeStreamCaptureMode(int *mode) { int was = *mode == 2 ? 0 : 2; *mode = was; return 0; }
#endif
int cuModuleLoadData(void **made, const char *image) {
    int refused = failed("cuModuleLoadData");
    if (refused) return refused;
    *made = &module; return memcmp(image, "\177ELF", 4) ? 200 : 0;
}
int cuModuleGetFunction(void **made, void *in, const char *name) {
    printf("{\"call\": \"function\", \"name\": \"%s\"}\n", name);
    *made = &function;
    int refused = failed("cuModuleGetFunction");
    return refused ? refused : in != &module;
}
int cuFuncSetAttribute(void *of, int attribute, int value) {
    printf("{\"call\": \"shared\", \"attribute\": %d, \"value\": %d}\n", attribute, value);
    int refused = failed("cuFuncSetAttribute");
    return refused ? refused : of != &function;
}
#ifndef OLDER
int cuFuncLoad(void *of) {
    int refused = failed("cuFuncLoad");
    return refused ? refused : of != &function;
}
#endif
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *of, int threads, size_t shared) {
    printf("{\"call\": \"occupancy\", \"threads\": %d, \"shared\": %zu}\n", threads, shared);
    *blocks = blocks_of_one;
    int refused = failed("cuOccupancyMaxActiveBlocksPerMultiprocessor");
    return refused ? refused : of != &function;
}
int cuMemAlloc_v2(void **made, size_t bytes) { *made = memory; return bytes > sizeof memory; }
int cuMemsetD8Async(void *at, unsigned char value, size_t bytes, void *on) {
    return at != memory || value || bytes > sizeof memory || on != &stream;
}
int cuStreamCreate(void **made, unsigned int flags) { *made = &stream; return flags != 1; }
int cuStreamDestroy_v2(void *which) { return which != &stream; }
int cuStreamSynchronize(void *which) { return which != &stream; }

/* A map is what it was made of, in 128 bytes: five of each, counted from the innermost dimension. */
int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
    int refused = failed("cuTensorMapEncodeTiled");
    if (refused) return refused;
    struct { uint64_t address, dims[5], strides[4]; uint32_t box[5]; int32_t type, rank, swizzle, promotion; } made = {0};
    if ((uintptr_t)map % 64 || rank > 5 || interleave || fill || sizeof made > 128) return 1;
    for (uint32_t i = 0; i < rank; i++) {
        if (steps[i] != 1) return 1;
        made.dims[i] = dims[i], made.box[i] = box[i];
        if (i + 1 < rank) made.strides[i] = strides[i];
    }
    made.address = (uint64_t)(uintptr_t)address;
    made.type = type, made.rank = (int32_t)rank, made.swizzle = swizzle, made.promotion = promotion;
    memset(map, 0, 128);
    memcpy(map, &made, sizeof made);
    return 0;
}

int cuLaunchKernelEx(const CUlaunchConfig *config, void *kernel, void **parameters, void **extra) {
    int refused = failed("cuLaunchKernelEx");
    if (refused || !current) return refused ? refused : 201;
    if (kernel != &function || extra || config->attrs || config->numAttrs) return 1;
    printf("{\"call\": \"launch\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, \"stream\": %" PRIu64
           ", \"parameters\": [",
           config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
           config->blockDimZ, config->sharedMemBytes, (uint64_t)(uintptr_t)config->hStream);
    for (int i = 0; i < count; i++) {
        printf(i ? ", \"" : "\"");
        hex(parameters[i], sizes[i]);
        printf("\"");
    }
    printf("], \"memory\": %" PRIu64 "}\n", (uint64_t)(uintptr_t)memory);
    fflush(stdout);
    return 0;
}
