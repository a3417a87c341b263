// What hiprtc has built in and clang alone has not: enough of HIP to compile the kernels' text without ROCm.
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define HIP_INLINE static __device__ __forceinline__

struct hip_thread_index {
  __device__ operator unsigned() const { return __builtin_amdgcn_workitem_id_x(); }
};
struct hip_block_index {
  __device__ operator unsigned() const { return __builtin_amdgcn_workgroup_id_x(); }
};
template <typename Index>
struct hip_indices {
  Index x;
};
extern const __device__ hip_indices<hip_thread_index> threadIdx;
extern const __device__ hip_indices<hip_block_index> blockIdx;

HIP_INLINE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
HIP_INLINE float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
HIP_INLINE double ceil(double a) { return __builtin_ceil(a); }
HIP_INLINE float fabsf(float a) { return __builtin_fabsf(a); }
HIP_INLINE void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
HIP_INLINE void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
HIP_INLINE int atomicAdd(int* at, int value) {
  return __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
HIP_INLINE int hip_lane() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)); }
template <typename T>
HIP_INLINE T hip_permute(T x, int lane) {
  return __builtin_bit_cast(T, __builtin_amdgcn_ds_bpermute(lane << 2, __builtin_bit_cast(int, x)));
}
template <typename T>
HIP_INLINE T __shfl(T x, int lane, int width) {
  return hip_permute(x, (hip_lane() & -width) | (lane & (width - 1)));
}
template <typename T>
HIP_INLINE T __shfl_xor(T x, int offset, int) {
  return hip_permute(x, hip_lane() ^ offset);
}
HIP_INLINE int __all(int condition) {
  return __builtin_amdgcn_ballot_w64(condition) == __builtin_amdgcn_ballot_w64(true);
}
