#include "cpu/executor.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>

#include "cpu/float_environment.h"

namespace natten_jax::cpu {
namespace {

constexpr std::align_val_t kScratchAlignment{64};

struct ScratchDeleter {
  void operator()(std::byte* scratch) const { ::operator delete(scratch, kScratchAlignment); }
};

using Scratch = std::unique_ptr<std::byte, ScratchDeleter>;

Scratch allocate_scratch(std::size_t bytes) {
  return Scratch(
      static_cast<std::byte*>(::operator new(std::max<std::size_t>(bytes, 1), kScratchAlignment, std::nothrow)));
}

/// State of one call, shared by the threads that process its items. A closure may start after the call has returned.
/// The closure owns a reference to this state, so the state still exists. No item is left by then, so the closure does
/// not access `item`, which was on the caller's stack.
struct Shared {
  std::int64_t count;
  std::size_t scratch_bytes;
  const std::function<void(std::int64_t, std::byte*)>* item;
  std::atomic<std::int64_t> next{0};
  std::atomic<std::int64_t> finished{0};
  std::mutex mutex;
  std::condition_variable all_finished;

  void work(std::byte* scratch) {
    const FlushDenormals flush;
    std::int64_t done = 0;
    for (std::int64_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < count; ++done) {
      (*item)(index, scratch);
    }
    if (done > 0 && finished.fetch_add(done, std::memory_order_acq_rel) + done == count) {
      const std::lock_guard<std::mutex> lock(mutex);
      all_finished.notify_all();
    }
  }

  void help() {
    if (next.load(std::memory_order_relaxed) >= count) return;
    // If there is no memory for another scratch buffer, the other threads process the items.
    const Scratch scratch = allocate_scratch(scratch_bytes);
    if (scratch) work(scratch.get());
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    all_finished.wait(lock, [this] { return finished.load(std::memory_order_acquire) == count; });
  }
};

}  // namespace

bool run_items(const Executor& executor, std::int64_t count, std::size_t scratch_bytes,
               const std::function<void(std::int64_t, std::byte*)>& item) {
  if (count <= 0) return true;
  const Scratch scratch = allocate_scratch(scratch_bytes);
  if (!scratch) return false;
  const auto shared = std::make_shared<Shared>();
  shared->count = count;
  shared->scratch_bytes = scratch_bytes;
  shared->item = &item;
  try {
    const std::int64_t helpers = std::min(executor.threads, count - 1);
    for (std::int64_t i = 0; i < helpers; ++i) executor.schedule([shared] { shared->help(); });
  } catch (...) {
    // A closure could not be scheduled. The calling thread processes the items that no other thread takes.
  }
  shared->work(scratch.get());
  shared->wait();
  return true;
}

}  // namespace natten_jax::cpu
