#include <cute/arch/copy_sm90_desc.hpp>

#include "cuda/common/entry_axis.cuh"
#include "cuda/tma/entry_maps.h"

namespace natten_jax {
namespace {

/// Makes the tensor maps of batch entries. A CTA makes the maps of one batch entry, and each of its threads makes one
/// map.
__global__ void natten_jax_entry_maps(const __grid_constant__ EntryMaps p) {
  allow_next_kernel();
  if (p.counter != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.counter = 0;
  const int batch = blockIdx.x, array = threadIdx.x / p.classes, group_class = threadIdx.x % p.classes;
  CUtensorMap* const map = p.result + batch * blockDim.x + threadIdx.x;
  const auto* from = reinterpret_cast<const uint4*>(&p.base_maps[array]);
  for (int i = 0; i < static_cast<int>(sizeof(CUtensorMap) / sizeof(uint4)); ++i) {
    reinterpret_cast<uint4*>(map)[i] = from[i];
  }
  const bool are_queries = (p.are_queries >> array & 1) != 0;
  std::uint32_t tokens[kRank];
  for (int i = 0; i < kRank; ++i) {
    const std::int32_t* const layout = p.layouts + batch * kRank * kRank + p.dimension[i];
    const EntryAxis entry(p.axis[i], layout[0], layout[kRank], layout[2 * kRank]);
    const int all = are_queries ? entry.query_local_extent : entry.kv_local_extent;
    const int group_tokens = are_queries ? entry.query_group_tokens : entry.kv_group_tokens;
    // Extents of tensor maps must not be zero, so maps of empty groups have one token. Tiles of empty groups are never
    // copied.
    tokens[i] = max(p.classes == 1 ? all : group_tokens + (group_class >> i & 1), 1);
  }
  const auto address = reinterpret_cast<std::uint64_t>(map);
  asm volatile(
      "tensormap.replace.tile.global_dim.global.b1024.b32 [%0], 1, %1;\n"
      "tensormap.replace.tile.global_dim.global.b1024.b32 [%0], 2, %2;\n"
      "tensormap.replace.tile.global_dim.global.b1024.b32 [%0], 3, %3;\n"
      "fence.proxy.tensormap::generic.release.gpu;" ::"l"(address),
      "r"(tokens[0]), "r"(tokens[1]), "r"(tokens[2])
      : "memory");
  // Keeps the PDL chain transitive: a kernel that waits for this kernel must thereby also wait for the previous kernel,
  // with which this kernel overlaps.
  wait_for_previous_kernel();
}

}  // namespace

cudaError_t launch_entry_maps(const EntryMaps& maps, cudaStream_t stream, bool overlaps) {
  return launch(natten_jax_entry_maps, {dim3(maps.batch), maps.arrays * maps.classes, 0, stream, overlaps}, maps);
}

}  // namespace natten_jax
