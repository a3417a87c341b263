// Merging and finishing of packed states: rows of o, then l, then m. Compiled without contraction.
//
// The same operations in the same order as `combine.py` and `exponential.py`, so that a GPU ends with the very bits
// that a CPU ends with. Constants come from there.

#include "dialect.cu"
#include "exponential.cu"

struct ta_merge {
  const float* sources[TA_SOURCES];
  float* out;  // may be one of the sources
  long long count, width;
};

struct ta_finish {
  const float *packed, *sink;  // sink (heads,), or null
  float *out, *lse;
  long long heads, tokens, width;
};

// Largest m of the sources that hold keys, NaN if one is, and how many they are.
TA_INLINE float ta_highest(const ta_merge& call, long long row, int* live) {
  float highest = -TA_INF;
  *live = 0;
  for (int i = 0; i < (int)call.count; i++) {
    const float* state = call.sources[i] + row * call.width + call.width - 2;
    if (state[0] != 0.f) {
      *live += 1;
      if (state[1] > highest || state[1] != state[1]) highest = state[1];
    }
  }
  return highest;
}

// One block merges one row.
extern "C" __global__ void TA_LAUNCH_BOUNDS(TA_THREADS, 1) treeattn_merge(const ta_merge call) {
  __shared__ float weights[TA_SOURCES], top;
  __shared__ int live;
  const long long row = blockIdx.x, offset = row * call.width;
  if (threadIdx.x == 0) top = ta_highest(call, row, &live);
  __syncthreads();
  for (int i = threadIdx.x; i < (int)call.count; i += TA_THREADS) {
    const float* state = call.sources[i] + offset + call.width - 2;
    // A live source alone keeps its bits: its weight is 1 even where m - m is NaN. Without keys, l = 0, it is skipped.
    weights[i] = state[0] == 0.f ? -1.f : live > 1 ? (float)ta_exp((double)(state[1] - top)) : 1.f;
  }
  __syncthreads();  // `out` may be a source: all of l and m has been read before any of it is written
  for (int j = threadIdx.x; j < (int)call.width - 1; j += TA_THREADS) {
    bool started = false;
    float sum = 0.f;
    for (int i = 0; i < (int)call.count; i++) {
      if (weights[i] == -1.f) continue;
      const float added = weights[i] * call.sources[i][offset + j];
      sum = started ? sum + added : added;
      started = true;
    }
    call.out[offset + j] = sum;
  }
  if (threadIdx.x == 0) call.out[offset + call.width - 1] = top;
}

// One block finishes one row.
extern "C" __global__ void TA_LAUNCH_BOUNDS(TA_THREADS, 1) treeattn_finish(const ta_finish call) {
  const long long row = blockIdx.x;
  const int width = (int)call.width - 2;
  const float* state = call.packed + row * call.width;
  float* out = call.out + row * width;
  const float sink = call.sink ? call.sink[row / call.tokens % call.heads] : -TA_INF;
  const float l = state[width], m = state[width + 1], highest = sink > m ? sink : m;
  const bool plain = sink == -TA_INF;
  const float weight = plain ? 1.f : (float)ta_exp((double)(m - highest));
  const float extra = sink == highest ? 1.f : (float)ta_exp((double)(sink - highest));  // inf - inf is NaN
  const float total = plain ? l : weight * l + extra;
  for (int j = threadIdx.x; j < width; j += TA_THREADS) {
    out[j] = l == 0.f ? 0.f : (plain ? state[j] : weight * state[j]) / total;
  }
  if (threadIdx.x == 0) call.lse[row] = l == 0.f ? sink : (plain ? m : highest) + (float)ta_log((double)total);
}

// The state of no keys.
extern "C" __global__ void TA_LAUNCH_BOUNDS(TA_THREADS, 1) treeattn_identity(float* packed, long long width) {
  for (int j = threadIdx.x; j < (int)width; j += TA_THREADS) {
    packed[blockIdx.x * width + j] = j == (int)width - 1 ? -TA_INF : 0.f;
  }
}
