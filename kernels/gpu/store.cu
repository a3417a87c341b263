// New tokens into a cache: elements of any float type and any strides, converted to the cache's type. Rows of the same
// type are copied 16 bytes at a time where they are aligned. Positions, which are whole numbers, are copied likewise.

#include "dialect.cu"
#include "types.cu"

#define TA_FLOAT64 6
#define TA_INT64 7
#define TA_WAVES (TA_THREADS / TA_WAVE)

struct ta_copy {
  const char* from;
  char* to;
  long long from_stride[4], to_stride[4];  // bytes; (batch, head, token, width)
  long long heads, tokens, width, rows;    // rows = batch * heads * tokens
  long long from_type, to_type;
  long long unit;  // bytes that a lane moves unchanged at a time; 0 where types differ
};

struct ta_store {
  ta_copy copies[2];  // the second may have no rows
};

// A double as the float next to it towards zero, its last bit set if anything was cut off: rounding that to 16 bits
// is as good as rounding the double itself.
TA_INLINE float ta_sticky(double x) {
  union {
    float f;
    unsigned u;
  } both;
  both.f = (float)x;
  if ((double)both.f == x || x != x) return both.f;
  if ((x < 0.0 ? -(double)both.f : (double)both.f) > (x < 0.0 ? -x : x)) both.u -= 1;
  both.u |= 1u;
  return both.f;
}

TA_INLINE unsigned short ta_bfloat_bits(float x) {
  union {
    float f;
    unsigned u;
  } both;
  both.f = x;
  if (x != x) return 0x7fc0u;
  return (unsigned short)((both.u + 0x7fffu + ((both.u >> 16) & 1u)) >> 16);
}

TA_INLINE void ta_convert(const char* from, long long from_type, char* to, long long to_type) {
  if (to_type == TA_FLOAT32) {
    *(float*)to = from_type == TA_FLOAT64 ? (float)*(const double*)from : ta_query(from, from_type);
    return;
  }
  const float x = from_type == TA_FLOAT64 ? ta_sticky(*(const double*)from) : ta_query(from, from_type);
  *(unsigned short*)to = to_type == TA_BFLOAT16 ? ta_bfloat_bits(x) : (unsigned short)ta_half_bits(x);
}

TA_INLINE void ta_move(const char* from, char* to, long long unit) {
  if (unit == 16) *(ta_v4*)to = *(const ta_v4*)from;
  if (unit == 8) *(double*)to = *(const double*)from;
  if (unit == 4) *(unsigned*)to = *(const unsigned*)from;
  if (unit == 2) *(unsigned short*)to = *(const unsigned short*)from;
}

// A wave writes a row.
TA_INLINE void ta_copy_row(const ta_copy& copy, long long row, int lane) {
  const long long token = row % copy.tokens, pair = row / copy.tokens;
  const long long head = pair % copy.heads, batch = pair / copy.heads;
  const char* from = copy.from + batch * copy.from_stride[0] + head * copy.from_stride[1] + token * copy.from_stride[2];
  char* to = copy.to + batch * copy.to_stride[0] + head * copy.to_stride[1] + token * copy.to_stride[2];
  for (int i = lane; i < (int)copy.width; i += TA_WAVE) {
    const char* source = from + i * copy.from_stride[3];
    char* target = to + i * copy.to_stride[3];
    if (copy.unit) {
      ta_move(source, target, copy.unit);
    } else {
      ta_convert(source, copy.from_type, target, copy.to_type);
    }
  }
}

extern "C" __global__ void TA_LAUNCH_BOUNDS(TA_THREADS, 1) treeattn_store(const ta_store call) {
  const long long row = (long long)blockIdx.x * TA_WAVES + threadIdx.x / TA_WAVE;
  const long long first = call.copies[0].rows;
  const int lane = threadIdx.x % TA_WAVE;
  if (row < first) {
    ta_copy_row(call.copies[0], row, lane);
  } else if (row - first < call.copies[1].rows) {
    ta_copy_row(call.copies[1], row - first, lane);
  }
}
