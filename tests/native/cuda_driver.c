// A stub driver for Mosaic's compiler: one GPU of compute capability 10.0, on which nothing can be loaded.
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = 0; return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuCtxGetCurrent(void** context) { *context = (void*)1; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 10 : attribute == 76 ? 0 : attribute == 16 ? 148 : attribute == 97 ? 232448 : 1;
  return 0;
}
int cuGetErrorName(int error, const char** name) { *name = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuGetErrorString(int error, const char** text) { *text = "no GPU is here"; return 0; }
int cuModuleLoadData(void** module, const void* image) { return 100; }
int cuModuleLoadDataEx(void** module, const void* image, unsigned n, void* options, void* values) { return 100; }
