#pragma once
// What only Hopper can do (sm_90a), as functions, for hopper_*.cu. Three ideas:
//
//   TMA       One thread names a box of a matrix; a copy engine moves it between global and shared
//             memory, no registers and no address arithmetic involved. What lies outside of the
//             matrix is read as zero and never written.
//   mbarrier  A counter in shared memory. Threads arrive at it, the copy engine reports the bytes
//             that it has moved, and whoever waits goes on when all expected of both have come.
//             Then it starts over: the phases take turns in having parity 0 and 1.
//   wgmma     Four warps (a warpgroup) start a product of two tiles of shared memory and do not
//             wait. The sum stays in their registers.
//
// Tiles are swizzled: a row has 128 bytes, and its eight chunks of 16 bytes are permuted by
// chunk ^= row % 8. The eight rows of a column of chunks then lie in different banks. TMA and wgmma
// both do it by themselves if the tile begins at a multiple of 1024 bytes.
//
// NVIDIA's PTX ISA, sections on wgmma, cp.async.bulk.tensor and mbarrier.

#include <cuda.h>
#include <cudaTypedefs.h>

#include "common/device_cuda.h"
#include "common/driver_function.h"
#include "common/dtype.h"

namespace lockstep::hopper {

// ---- On the host ----

inline bool present() {  // is the GPU that this rank uses one of them?
  int index = 0, major = 0, minor = 0;
  check(cudaGetDevice(&index));
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index));
  return major == 9 && minor == 0;
}

// How TMA sees a row-major matrix: where it is, and the box that one copy moves. A box is 128 bytes
// wide. The driver makes the map.
inline CUtensorMap tensor_map(const void* matrix, DType type, int64_t rows, int64_t columns,
                              int box_rows) {
  static auto encode = driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled");
  CUtensorMap map;
  cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)};
  cuuint64_t row_bytes[] = {cuuint64_t(columns) * size_of(type)};
  cuuint32_t box[] = {cuuint32_t(128 / size_of(type)), cuuint32_t(box_rows)}, steps[] = {1, 1};
  CUresult result = encode(
      &map,
      type == DType::BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2,
      const_cast<void*>(matrix), sizes, row_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(result == CUDA_SUCCESS, "TMA cannot read a matrix of ", rows, " x ", columns, " ",
          name_of(type), " (error ", int(result), ")");
  return map;
}

// TMA wants rows that begin at multiples of 16 bytes, and a matrix that is not empty.
inline bool fits_tma(const void* matrix, DType type, int64_t rows, int64_t columns) {
  return reinterpret_cast<uintptr_t>(matrix) % 16 == 0 &&
         columns * int64_t(size_of(type)) % 16 == 0 && rows > 0 && columns > 0 &&
         rows < INT32_MAX && columns < INT32_MAX;
}

// ---- On the device: mbarriers ----

__device__ inline uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

__device__ inline void init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}
// After init and before others use it: the copy engine and the cluster see barriers, too.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// At the barrier that has the same place in block `rank` of the cluster.
__device__ inline void arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{ .reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// Arrives, and announces bytes that the copy engine will report.
__device__ inline void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Until the phase of this parity is over. A new barrier's phase of parity 1 counts as over.
__device__ inline void wait(uint64_t* barrier, int parity) {
  uint32_t over = 0;
  while (!over)
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(over)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// A place in a ring of stages, and the parity of the phase that it is in.
template <int Stages>
struct Place {
  int stage = 0, parity = 0;
  __device__ void advance() {
    if (++stage == Stages) stage = 0, parity ^= 1;
  }
};

// ---- TMA: the box whose first element is [row, column] ----

__device__ inline void load_box(void* to, const CUtensorMap& from, int row, int column,
                                uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(&from), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}
// To the same place in every block of the cluster whose bit is set, and to its barrier there.
__device__ inline void load_box(void* to, const CUtensorMap& from, int row, int column,
                                uint64_t* barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(shared_address(to)),
      "l"(&from), "r"(shared_address(barrier)), "h"(blocks), "r"(column), "r"(row)
      : "memory");
}
__device__ inline void store_box(const CUtensorMap& to, int row, int column, const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&to),
      "r"(shared_address(from)), "r"(column), "r"(row)
      : "memory");
}
__device__ inline void add_box(const CUtensorMap& to, int row, int column, const void* from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::
          "l"(&to),
      "r"(shared_address(from)), "r"(column), "r"(row)
      : "memory");
}
// Stores of this thread form groups. Waits until all but the last N groups have read their source.
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
__device__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// Between a thread's own writes to shared memory and a barrier after which TMA reads them.
__device__ inline void publish_to_tma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Warpgroups and clusters ----

// Registers go from the warpgroup that only starts copies to those that hold sums.
template <int Registers>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
__device__ inline int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void cluster_barrier() {  // of all threads of all blocks in it
  __syncwarp();
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// ---- wgmma ----

// Before the first product, and after other instructions have touched its registers.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all are done. The compiler takes a sum for finished when its product has been issued;
// naming it here keeps it from reading any earlier.
__device__ inline void finish_products(float (&sum)[128]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (float& x : sum) asm volatile("" : "+f"(x)::"memory");
}

// Where a swizzled tile is; adding 1 moves on by 16 bytes. A tile whose rows run along m or n, not
// along k, may be wider than 64 elements: `next` is then the distance in bytes to the box with the
// next 64.
__device__ inline uint32_t tile_at(const void* tile, int next = 16) {
  return uint32_t(next >> 4) << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

// sum [64, 256] (+)= a [64, 16] b [16, 256]. Transposed: rows of the tile run along m or n. sum[4
// j] and [4 j + 1] are row lane / 4 of the warp's 16 and columns 8 j + 2 (lane % 4) and the next;
// [4 j + 2] and [4 j + 3] the same eight rows below.
#define R4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)
#define R64(i) R16(i), R16(i + 16), R16(i + 32), R16(i + 48)
template <bool TransposedA, bool TransposedB>
__device__ void multiply_16_deep(float (&sum)[128], uint32_t a, uint32_t b, bool add) {
  // Swizzled, and rows (of 128 bytes) come in groups of eight, 1024 bytes apart.
  constexpr uint64_t kind = uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32;
  asm volatile(
      "{ .reg .pred p;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19,"
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37,"
      "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55,"
      "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73,"
      "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91,"
      "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107,"
      "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122,"
      "%123, %124, %125, %126, %127}, %128, %129, p, 1, 1, %131, %132; }"
      : R64(0), R64(64)
      : "l"(kind | a), "l"(kind | b), "r"(int(add)), "n"(int(TransposedA)), "n"(int(TransposedB)));
}
#undef R4
#undef R16
#undef R64

}  // namespace lockstep::hopper
