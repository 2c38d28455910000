/* A libcuda without a GPU, for launch_cases.py. A kernel does not run: a function of the program is called instead. All
   other calls do nothing and return 0, success. */

typedef unsigned long long Handle;

/* The start of CUlaunchConfig in cuda.h. */
typedef struct {
  unsigned numbers[7]; /* the grid, the block, bytes of shared memory */
  Handle stream;
} LaunchConfig;

typedef void (*OnLaunch)(const unsigned *numbers, Handle stream, Handle function, void **parameters);

static OnLaunch on_launch;

void call_at_launches(OnLaunch called) { on_launch = called; }

int cuLaunchKernelEx(const LaunchConfig *config, Handle function, void **parameters, void **extra) {
  on_launch(config->numbers, config->stream, function, parameters);
  return 0;
}

/* Triton's launchers look up the address that the device has for a tensor. */
int cuPointerGetAttribute(void **value, int attribute, void *address) {
  *value = address;
  return 0;
}

/* What else Triton's launchers call, and then its module for the driver, which launches all kernels from 3.9 on. */
#define RETURNS_SUCCESS(name) \
  int name(void) { return 0; }
RETURNS_SUCCESS(cuCtxGetCurrent)
RETURNS_SUCCESS(cuCtxSetCurrent)
RETURNS_SUCCESS(cuDeviceGet)
RETURNS_SUCCESS(cuDevicePrimaryCtxRetain)
RETURNS_SUCCESS(cuFuncSetAttribute)
RETURNS_SUCCESS(cuGetErrorString)
RETURNS_SUCCESS(cuCtxGetDevice)
RETURNS_SUCCESS(cuCtxGetLimit)
RETURNS_SUCCESS(cuCtxSetLimit)
RETURNS_SUCCESS(cuDeviceGetAttribute)
RETURNS_SUCCESS(cuDriverGetVersion)
RETURNS_SUCCESS(cuFuncGetAttribute)
RETURNS_SUCCESS(cuFuncSetCacheConfig)
RETURNS_SUCCESS(cuModuleGetFunction)
RETURNS_SUCCESS(cuModuleLoadData)
RETURNS_SUCCESS(cuModuleUnload)
RETURNS_SUCCESS(cuStreamIsCapturing)
