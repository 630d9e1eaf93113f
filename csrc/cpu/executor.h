// Runs independent work items on a thread pool of the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace natten_jax::cpu {

/// A thread pool: its number of threads, and a function that schedules a closure.
struct Executor {
  std::int64_t threads = 0;
  std::function<void(std::function<void()>)> schedule;
};

/// Calls `item(index, scratch)` for every index below `count`, in any order and on any thread.
///
/// The calling thread also processes items. At the end it waits for items that other threads have started, but not for
/// closures that have not started. So the call cannot hang if all threads of the pool are busy, or if the calling
/// thread is one of them. `item` must not throw.
///
/// Args:
///   executor: the thread pool that may help.
///   count: number of items.
///   scratch_bytes: size of the scratch buffer that each thread passes to `item`, aligned to 64 bytes.
///   item: processes an item.
///
/// Returns:
///   False if there was no memory for the scratch buffer of the calling thread. No item was then processed.
bool run_items(const Executor& executor, std::int64_t count, std::size_t scratch_bytes,
               const std::function<void(std::int64_t, std::byte*)>& item);

}  // namespace natten_jax::cpu
