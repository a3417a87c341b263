// One kernel as a shared library: `launch` runs its blocks, in the order given.
#include "cuda_on_cpu.h"

#include KERNEL_TEXT

static const KERNEL_STRUCT* arguments;

extern "C" const char* launch(const KERNEL_STRUCT* call, const int* order, int blocks, int wave) {
  fibers::wave = wave;
  arguments = call;
  fibers::body = [] { KERNEL_NAME(*arguments); };
  gridDim.x = blocks;
  for (int i = 0; i < blocks; i++) {
    blockIdx.x = order[i];
    if (!fibers::run_block(TA_THREADS)) return fibers::report;
  }
  return nullptr;
}
