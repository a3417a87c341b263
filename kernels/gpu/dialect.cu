// What CUDA and HIP call differently. Everything behind this file is one text for both.
//
// The tests execute that text on a CPU: they define TA_SHIM and bring these names themselves. No header is included,
// because NVRTC and hiprtc have none in common. A width of a wave appears only as TA_WAVE, which the host defines:
// HIP's `warpSize` is no constant, and a literal would be wrong on half of AMD's cards.

#if defined(__HIP__) || defined(__HIPCC_RTC__)
#define TA_HIP 1
#endif

#define TA_INLINE __device__ __forceinline__

struct alignas(16) ta_v4 {
  unsigned x, y, z, w;
};

struct alignas(16) ta_f4 {
  float at[4];
};

#ifndef TA_SHIM

#ifdef TA_HIP
// The forms without a mask: those with one want 64 bits on ROCm 7 and 32 on CUDA.
#define TA_SHUFFLE(x, lane, width) __shfl(x, lane, width)
#define TA_SHUFFLE_XOR(x, offset, width) __shfl_xor(x, offset, width)
#define TA_ALL(condition) __all(condition)
#define TA_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads)
#else
#define TA_SHUFFLE(x, lane, width) __shfl_sync(0xffffffffu, x, lane, width)
#define TA_SHUFFLE_XOR(x, offset, width) __shfl_xor_sync(0xffffffffu, x, offset, width)
#define TA_ALL(condition) __all_sync(0xffffffffu, condition)
#define TA_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#endif

// 2**x to two units in the last place; results below the normal range are 0.
TA_INLINE float ta_exp2(float x) {
#ifdef TA_HIP
  return __builtin_amdgcn_exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// float16 from its bits.
TA_INLINE float ta_half(unsigned bits) {
#ifdef TA_HIP
  return (float)__builtin_bit_cast(_Float16, (unsigned short)bits);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)bits));
  return y;
#endif
}

// The bits of a number rounded to float16, on cards of any age.
TA_INLINE unsigned ta_half_bits(float x) {
#ifdef TA_HIP
  return __builtin_bit_cast(unsigned short, (_Float16)x);
#else
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#endif
}

// Two numbers rounded to float16 or bfloat16, the first in the low half.
TA_INLINE unsigned ta_pack_half(float low, float high) {
#ifdef TA_HIP
  unsigned a = __builtin_bit_cast(unsigned short, (_Float16)low);
  unsigned b = __builtin_bit_cast(unsigned short, (_Float16)high);
  return a | (b << 16);
#else
  unsigned y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#endif
}

TA_INLINE unsigned ta_pack_bfloat(float low, float high) {
#ifdef TA_HIP
  unsigned a = __builtin_bit_cast(unsigned, low), b = __builtin_bit_cast(unsigned, high);
  a = low != low ? 0x7fc00000u : a + 0x7fffu + ((a >> 16) & 1u);
  b = high != high ? 0x7fc00000u : b + 0x7fffu + ((b >> 16) & 1u);
  return (a >> 16) | (b & 0xffff0000u);
#else
  unsigned y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#endif
}

// The low, or the high, halves of two words, side by side.
TA_INLINE unsigned ta_low_halves(unsigned first, unsigned second) {
#ifdef TA_HIP
  return __builtin_amdgcn_perm(second, first, 0x05040100u);
#else
  return __byte_perm(first, second, 0x5410);
#endif
}

TA_INLINE unsigned ta_high_halves(unsigned first, unsigned second) {
#ifdef TA_HIP
  return __builtin_amdgcn_perm(second, first, 0x07060302u);
#else
  return __byte_perm(first, second, 0x7632);
#endif
}

#endif  // TA_SHIM

TA_INLINE float ta_float(unsigned bits) {
  union {
    unsigned u;
    float f;
  } both;
  both.u = bits;
  return both.f;
}

TA_INLINE int ta_min(int a, int b) { return a < b ? a : b; }

#define TA_INF ta_float(0x7f800000u)
#define TA_LOG2E 1.44269504f
