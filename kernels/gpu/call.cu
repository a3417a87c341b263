// One call's arguments, and where a block stands in them. `call.py` fills this very struct: keep the two in step.
// All strides are in bytes.

#include "dialect.cu"

struct ta_call {
  const char *q, *k, *v;
  long long q_stride[4], k_stride[4], v_stride[4];  // (batch, head, token, width)
  const char *q_pos, *kv_pos;                       // int64 (batch, token), where TA_POSITIONS; kv_pos may be null:
  long long q_pos_stride[2], kv_pos_stride[2];
  long long kv_start;                                // keys then follow each other from this position on
  long long before, after;                           // a query at t sees positions t - before to t + after
  const long long* kv_len;                           // (batch,), or null
  const char* mask;                                  // (batch, query head, query token, key), where TA_MASK
  long long mask_stride[4];
  const char *k_scale, *v_scale;  // float32 (batch, head, block), where TA_K_SCALED, TA_V_SCALED
  long long k_scale_stride[3], v_scale_stride[3];
  long long k_block, v_block;  // tokens that one scale covers
  float* part;                 // states of the splits, on their way to the last block
  int* arrived;                // one counter for each tile of rows, 0 between launches
  float* out;                  // packed states (batch, query head, query token, TA_DV + 2)
  long long kv_heads, group, q_tokens, kv_tokens, splits, tiles, q_type;
  float scale, softcap;
};

// A block works on one split of the keys for TA_ROWS neighbouring rows of one KV head. A row is a query head and a
// query token: row = head within the group * q_tokens + token, which is also the order of packed states.
struct ta_place {
  int batch, head, first_row, rows, split, tile;  // tile counts over batch, head and rows
  int first_key, end_key;                         // this split's keys
};

TA_INLINE int ta_keys(const ta_call& call, int batch) {
  const long long length = call.kv_len ? call.kv_len[batch] : call.kv_tokens;
  return (int)(length < 0 ? 0 : length < call.kv_tokens ? length : call.kv_tokens);
}

// `step` keys are what a block takes at once: splits end at multiples of it.
TA_INLINE ta_place ta_here(const ta_call& call, int step) {
  ta_place here;
  const int splits = (int)call.splits, tiles = (int)call.tiles, heads = (int)call.kv_heads;
  here.tile = blockIdx.x / splits;
  here.split = blockIdx.x % splits;
  const int pair = here.tile / tiles;
  here.batch = pair / heads;
  here.head = pair % heads;
  here.first_row = here.tile % tiles * TA_ROWS;
  here.rows = ta_min((int)(call.group * call.q_tokens) - here.first_row, TA_ROWS);
  const int keys = ta_keys(call, here.batch);
  const int steps = (keys - 1) / step + 1;
  const int per_split = (steps + splits - 1) / splits * step;
  // 64 bits: with more splits than steps, the product passes the last key by far.
  const long long first = (long long)here.split * per_split;
  here.first_key = (int)(first < keys ? first : keys);
  here.end_key = ta_min(keys - here.first_key, per_split) + here.first_key;
  return here;
}

// Where the elements of a query row begin. Rows behind the tile's last are read as the last, and never written.
TA_INLINE const char* ta_query_row(const ta_call& call, const ta_place& here, int row) {
  const int r = here.first_row + ta_min(row, here.rows - 1), tokens = (int)call.q_tokens;
  return call.q + here.batch * call.q_stride[0] + (here.head * call.group + r / tokens) * call.q_stride[1] +
         r % tokens * call.q_stride[2];
}
