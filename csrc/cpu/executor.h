// Runs independent work items on a borrowed thread pool.
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
/// The calling thread takes part, and waits for items that were started rather than for closures that were scheduled,
/// so a pool whose threads are all busy (or include the caller) cannot block it. `item` must not throw.
///
/// Args:
///   executor: the pool that may help.
///   count: number of items.
///   scratch_bytes: private memory of every participating thread, 64-byte aligned.
///   item: the work.
///
/// Returns:
///   False if the scratch could not be allocated; then nothing was run.
bool run_items(const Executor& executor, std::int64_t count, std::size_t scratch_bytes,
               const std::function<void(std::int64_t, std::byte*)>& item);

}  // namespace natten_jax::cpu
