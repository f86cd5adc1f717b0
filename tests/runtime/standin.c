// Stands in for the DSL's CUDA runtime library: records launches, so that host code runs on a CPU.
// log(kind, a, b) is a Python callback set through mok_standin_log.
#include <stdint.h>
#include <string.h>

typedef struct { uint32_t grid[3], block[3]; uint64_t smem; void *stream; void *attrs; int32_t num_attrs; } Config;
static void (*log_)(const char *, int64_t, const void *);
static int fail_;

void mok_standin_log(void (*f)(const char *, int64_t, const void *)) { log_ = f; }
void mok_standin_fail(int code) { fail_ = code; }

int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, int c, void *d, void *e, int f) {
  *library = (void *)0x11; log_("load", 0, code); return 0;
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  static char names[16][256]; static int n;
  strncpy(names[n], name, 255); *kernel = names[n]; n = (n + 1) % 16;
  log_("kernel", (int64_t)library, name); return 0;
}
int _cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { *value = 0; return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  if (attribute == 8) log_("prepare", device, kernel);
  return 0;
}
int _cudaFuncSetAttribute(void *kernel, int attribute, int value) { return 0; }
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *kernel, int block, uint64_t smem) { *n = 1; return 0; }
int _cudaLaunchKernel(void *kernel, int gx, int gy, int gz, int bx, int by, int bz, void **params, uint64_t smem, void *stream) { return 1; }

typedef struct { const char *kernel; const Config *config; void **params; } Launch;
int _cudaLaunchKernelEx(const Config *config, void *kernel, void **params) {
  Launch launch = {kernel, config, params};
  log_("launch", (int64_t)config->stream, &launch);
  return fail_;
}
