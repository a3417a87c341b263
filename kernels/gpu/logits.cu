// From a dot product to a logit: scale, softcap, float mask, then hide. A hidden key has a logit of -inf.

#include "call.cu"

// What decides about one query row.
struct ta_row {
  long long first, last;  // positions that it sees
  const char* mask;
};

// Nobody has looked at a position on the card: within these limits nothing that is added to it overflows.
TA_INLINE long long ta_position(long long stored) {
  const long long most = 1LL << 61;
  return stored < -most ? -most : stored < most ? stored : most;
}

TA_INLINE ta_row ta_row_of(const ta_call& call, const ta_place& here, int row) {
  const int r = here.first_row + ta_min(row, here.rows - 1), tokens = (int)call.q_tokens;
  ta_row found = {};
#if TA_POSITIONS
  const char* stored = call.q_pos + here.batch * call.q_pos_stride[0] + r % tokens * call.q_pos_stride[1];
  const long long position = ta_position(*(const long long*)stored);
  found.first = position - call.before;
  found.last = position + call.after;
#endif
#if TA_MASK
  found.mask = call.mask + here.batch * call.mask_stride[0] +
               (here.head * call.group + r / tokens) * call.mask_stride[1] + r % tokens * call.mask_stride[2];
#endif
  return found;
}

// tanh to 2 units in the last place: a polynomial near 0, where 1 - 2 / (e**2x + 1) cancels.
TA_INLINE float ta_tanh(float x) {
  const float size = fabsf(x), z = x * x;
  if (size < 0.625f) {
    // Least largest relative error of a polynomial in z on this range: 5e-9 before rounding.
    float p = -5.6039137e-3f;
    p = p * z + 2.0551719e-2f;
    p = p * z - 5.3714108e-2f;
    p = p * z + 1.3331152e-1f;
    p = p * z - 3.3333272e-1f;
    return x + x * (z * p);
  }
  const float y = 1.f - 2.f / (ta_exp2(size * (2.f * TA_LOG2E)) + 1.f);
  return x < 0.f ? -y : y;
}

TA_INLINE float ta_block_scale(const char* scales, const long long* stride, const ta_place& here, int block) {
  return *(const float*)(scales + here.batch * stride[0] + here.head * stride[1] + block * stride[2]);
}

// `key` may lie behind the split's last: it is hidden then, and nothing of it is read.
TA_INLINE float ta_logit(const ta_call& call, const ta_place& here, const ta_row& row, int key, float dot) {
  bool seen = key < here.end_key;
  const int k = ta_min(key, here.end_key - 1);
#if TA_K_SCALED
  const float factor = ta_block_scale(call.k_scale, call.k_scale_stride, here, k / (int)call.k_block);
  dot *= fabsf(factor) < TA_INF ? factor : TA_INF - TA_INF;  // an infinity might pass for a hidden key's -inf
#endif
  float logit = dot * call.scale;
#if TA_SOFTCAP
  logit = call.softcap * ta_tanh(logit / call.softcap);
#endif
#if TA_MASK == 1
  seen = seen && *(const unsigned char*)(row.mask + k * call.mask_stride[3]);
#elif TA_MASK == 2
  const float added = *(const float*)(row.mask + k * call.mask_stride[3]);
  logit += added;
  seen = seen && added != -TA_INF;
#endif
#if TA_POSITIONS
  const char* stored = call.kv_pos + here.batch * call.kv_pos_stride[0] + k * call.kv_pos_stride[1];
  const long long at = call.kv_pos ? *(const long long*)stored : call.kv_start + k;
  seen = seen && at >= row.first && at <= row.last;
#endif
  return seen ? logit : -TA_INF;
}

// The running maximum that exponents are taken against: finite where nothing has been seen yet.
TA_INLINE float ta_reference(float highest) { return highest == -TA_INF ? 0.f : highest; }
