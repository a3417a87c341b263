// One kernel as a shared library: `launch` runs its blocks, in the order given, which also draws the direction of lanes.
#include "cuda_on_cpu.h"

namespace {  // so that shared memory of inline functions is this file's too, and lands in the one section
#include KERNEL_TEXT
static __attribute__((section("ta_shared"), used)) int shared_by_none;  // there is a section even where none is shared
}  // namespace

extern "C" char __start_ta_shared[], __stop_ta_shared[];

static const KERNEL_STRUCT* arguments;

extern "C" const char* launch(const KERNEL_STRUCT* call, const int* order, int blocks, int wave) {
  fibers::wave = wave;
  arguments = call;
  fibers::body = [] { KERNEL_NAME(*arguments); };
  gridDim.x = blocks;
  for (int i = 0; i < blocks; i++) {
    blockIdx.x = order[i];
    fibers::backwards = (i + order[0]) % 2;
    memset(__start_ta_shared, 0xff, __stop_ta_shared - __start_ta_shared);
    if (!fibers::run_block(TA_THREADS)) return fibers::report;
  }
  return nullptr;
}
