// Stored number types: 16 bytes to floats, and one element to a float.

#include "dialect.cu"

#define TA_FLOAT32 0
#define TA_BFLOAT16 1
#define TA_FLOAT16 2
#define TA_E4M3 3
#define TA_E5M2 4
#define TA_INT8 5

// e5m2 is the upper byte of a float16.
TA_INLINE float ta_e5m2(unsigned byte) { return ta_half(byte << 8); }

// e4m3 has float16's fields with an exponent bias of 7 instead of 15, and one NaN instead of infinities.
TA_INLINE float ta_e4m3(unsigned byte) {
  const float x = ta_half(((byte & 0x80u) << 8) | ((byte & 0x7fu) << 7)) * 256.f;
  return (byte & 0x7fu) == 0x7fu ? ta_float(0x7fc00000u) : x;
}

// Through the bits of 2**23 + n: half the cost of an integer conversion, and as exact.
TA_INLINE float ta_int8(unsigned byte) { return ta_float(0x4b000000u | (byte ^ 0x80u)) - 8388736.f; }

TA_INLINE void ta_e4m3_word(unsigned word, float* x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned low, high;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(low) : "h"((unsigned short)word));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(high) : "h"((unsigned short)(word >> 16)));
  x[0] = ta_half(low & 0xffffu);
  x[1] = ta_half(low >> 16);
  x[2] = ta_half(high & 0xffffu);
  x[3] = ta_half(high >> 16);
#else
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = ta_e4m3((word >> (8 * i)) & 0xffu);
#endif
}

template <int TYPE>
struct ta_type {
  static constexpr int BYTES = TYPE == TA_FLOAT32 ? 4 : TYPE == TA_BFLOAT16 || TYPE == TA_FLOAT16 ? 2 : 1;
  static constexpr int PER_LOAD = 16 / BYTES;

  static TA_INLINE float one(const char* at) {
    if (TYPE == TA_FLOAT32) return *(const float*)at;
    if (TYPE == TA_BFLOAT16) return ta_float((unsigned)*(const unsigned short*)at << 16);
    if (TYPE == TA_FLOAT16) return ta_half(*(const unsigned short*)at);
    const unsigned byte = *(const unsigned char*)at;
    return TYPE == TA_E4M3 ? ta_e4m3(byte) : TYPE == TA_E5M2 ? ta_e5m2(byte) : ta_int8(byte);
  }

  static TA_INLINE void word(unsigned bits, float* x) {
    if (TYPE == TA_FLOAT32) {
      x[0] = ta_float(bits);
    } else if (TYPE == TA_BFLOAT16) {
      x[0] = ta_float(bits << 16);
      x[1] = ta_float(bits & 0xffff0000u);
    } else if (TYPE == TA_FLOAT16) {
      x[0] = ta_half(bits & 0xffffu);
      x[1] = ta_half(bits >> 16);
    } else if (TYPE == TA_E4M3) {
      ta_e4m3_word(bits, x);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const unsigned byte = (bits >> (8 * i)) & 0xffu;
        x[i] = TYPE == TA_E5M2 ? ta_e5m2(byte) : ta_int8(byte);
      }
    }
  }
};

// PER_LOAD neighbouring elements of a row, on their way from memory: WIDE as one load of 16 bytes, otherwise one by
// one, for rows that are not aligned or whose elements are not neighbours. What lies behind the row's end is 0.
template <int TYPE, bool WIDE>
struct ta_piece {
  static constexpr int COUNT = ta_type<TYPE>::PER_LOAD;
  ta_v4 bits;

  TA_INLINE void load(const char* row, int first, int width, long long) {
    if (first < width) {
      bits = *(const ta_v4*)(row + first * ta_type<TYPE>::BYTES);
    } else {
      bits.x = bits.y = bits.z = bits.w = 0;
    }
  }

  TA_INLINE void get(float* x) const {
    constexpr int PER_WORD = COUNT / 4;
    ta_type<TYPE>::word(bits.x, x);
    ta_type<TYPE>::word(bits.y, x + PER_WORD);
    ta_type<TYPE>::word(bits.z, x + 2 * PER_WORD);
    ta_type<TYPE>::word(bits.w, x + 3 * PER_WORD);
  }
};

template <int TYPE>
struct ta_piece<TYPE, false> {
  static constexpr int COUNT = ta_type<TYPE>::PER_LOAD;
  float values[COUNT];

  TA_INLINE void load(const char* row, int first, int width, long long stride) {
#pragma unroll
    for (int e = 0; e < COUNT; e++) {
      values[e] = first + e < width ? ta_type<TYPE>::one(row + (first + e) * stride) : 0.f;
    }
  }

  TA_INLINE void get(float* x) const {
#pragma unroll
    for (int e = 0; e < COUNT; e++) x[e] = values[e];
  }
};

// One element of q. Its type is known at run time only: q is read once a launch.
TA_INLINE float ta_query(const char* at, long long type) {
  if (type == TA_FLOAT32) return ta_type<TA_FLOAT32>::one(at);
  return type == TA_BFLOAT16 ? ta_type<TA_BFLOAT16>::one(at) : ta_type<TA_FLOAT16>::one(at);
}
