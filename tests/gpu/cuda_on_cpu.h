// The names of CUDA and HIP, and of dialect.cu, on fibers: what the kernels' text needs to be plain C++.
#pragma once

#include <math.h>

#include "fibers.h"

#define TA_SHIM 1
#define __global__
#define __device__
#define __forceinline__ inline
// In a section of its own, which is filled with NaN before each block: what a block reads, it has written.
#define __shared__ static __attribute__((section("ta_shared")))
#define TA_LAUNCH_BOUNDS(threads, blocks)
#define TA_SHUFFLE(x, lane, width) cpu_shuffle(x, lane, width)
#define TA_SHUFFLE_XOR(x, offset, width) cpu_shuffle_xor(x, offset, width)
#define TA_ALL(condition) cpu_all(condition)

struct Index {
  // Read at each use: the fiber that asks decides.
  operator unsigned() const { return fibers::current; }
};
struct {
  Index x;
} threadIdx;
struct {
  unsigned x;
} blockIdx, gridDim;

inline void __syncthreads() { fibers::wait(fibers::AT_BARRIER); }
inline void __threadfence() {}
inline int atomicAdd(int* at, int value) {
  const int old = *at;
  *at += value;
  return old;
}

template <typename T>
T cpu_shuffle(T x, int lane, int width) {
  const int self = fibers::current % fibers::wave;
  return fibers::Meeting<T>(x, "shuffle").of(self / width * width + (lane % width + width) % width);
}

template <typename T>
T cpu_shuffle_xor(T x, int offset, int width) {
  const int self = fibers::current % fibers::wave, other = self ^ offset;
  const fibers::Meeting<T> meeting(x, "shuffle_xor");
  return meeting.of(other / width == self / width ? other : self);
}

inline bool cpu_all(bool condition) {
  const fibers::Meeting<bool> meeting(condition, "vote");
  bool all = true;
  for (int i = 0; i < fibers::wave; i++) all = all && meeting.of(i);
  return all;
}

template <typename To, typename From>
To cpu_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

inline float ta_exp2(float x) { return x < -126.f ? 0.f : exp2f(x); }
inline float ta_half(unsigned bits) { return (float)cpu_bits<_Float16>((unsigned short)bits); }
inline unsigned ta_half_bits(float x) { return cpu_bits<unsigned short>((_Float16)x); }
inline unsigned ta_pack_half(float low, float high) { return ta_half_bits(low) | (ta_half_bits(high) << 16); }
inline unsigned cpu_bfloat(float x) {
  const unsigned u = cpu_bits<unsigned>(x);
  return x != x ? 0x7fc0u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}
inline unsigned ta_pack_bfloat(float low, float high) { return cpu_bfloat(low) | (cpu_bfloat(high) << 16); }
inline unsigned ta_low_halves(unsigned a, unsigned b) { return (a & 0xffffu) | (b << 16); }
inline unsigned ta_high_halves(unsigned a, unsigned b) { return (a >> 16) | (b & 0xffff0000u); }

#ifdef TA_K_TYPE
inline float cpu_term(unsigned word, int high) {
  const unsigned bits = high ? word >> 16 : word & 0xffffu;
  return TA_K_TYPE == 2 ? ta_half(bits) : cpu_bits<float>(bits << 16);
}

// mma.sync m16n8k16, as the PTX manual lays out its fragments.
struct Fragments {
  unsigned a[4], b[2];
};

inline void ta_mma(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  const fibers::Meeting<Fragments> meeting({{a[0], a[1], a[2], a[3]}, {b0, b1}}, "mma");
  const int lane = fibers::current % 32, row = lane / 4, column = lane % 4 * 2;
  for (int i = 0; i < 4; i++) {
    float sum = d[i];
    for (int k = 0; k < 16; k++) {
      const Fragments left = meeting.of(row * 4 + k % 8 / 2), right = meeting.of((column + i % 2) * 4 + k % 8 / 2);
      sum += cpu_term(left.a[k / 8 * 2 + i / 2], k % 2) * cpu_term(right.b[k / 8], k % 2);
    }
    d[i] = sum;
  }
}

// AMD's 16 x 16 x 16: CDNA's MFMA on 64 lanes, WMMA of RDNA4 and RDNA3 on 32, as the ISA manuals lay them out.
template <typename Terms>
void ta_multiply(float* d, const Terms& a, const Terms& b) {
  struct Both {
    Terms a, b;
  };
  constexpr int TERMS = sizeof(Terms) / 2;
  const fibers::Meeting<Both> meeting({a, b}, "matrix");
  const int lane = fibers::current % fibers::wave, part = lane / 16, column = lane % 16;
  const int sums = 256 / fibers::wave;
  for (int i = 0; i < sums; i++) {
    const int row = TERMS == 16 ? 2 * i + part : part * sums + i;
    float sum = d[i];
    for (int k = 0; k < 16; k++) {
      const int from = TERMS == 16 ? 0 : k / TERMS * 16, term = TERMS == 16 ? k : k % TERMS;
      // RDNA3 reads the terms of both halves of the wave, which must hold the same.
      if (TERMS == 16 && memcmp(meeting.of(row).a.words, meeting.of(row + 16).a.words, sizeof(Terms))) abort();
      if (TERMS == 16 && memcmp(meeting.of(column).b.words, meeting.of(column + 16).b.words, sizeof(Terms))) abort();
      sum += cpu_term(meeting.of(from + row).a.words[term / 2], term % 2) *
             cpu_term(meeting.of(from + column).b.words[term / 2], term % 2);
    }
    d[i] = sum;
  }
}
#endif
