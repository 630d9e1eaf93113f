// Runs one work item on the calling thread, and one on a pool thread. Beforehand, neither thread flushes denormals to
// zero. For each thread, prints four words, `zero` or `kept`: first for a denormal operand and a denormal result during
// its item, then for both after its item.
#include <atomic>
#include <cstdio>
#include <limits>
#include <thread>
#include <vector>

#include "cpu/executor.h"

using namespace natten_jax::cpu;

namespace {

const char* operand() {
  volatile float denormal = std::numeric_limits<float>::denorm_min();
  return denormal * 0x1p100f == 0 ? "zero" : "kept";
}

const char* result() {
  volatile float smallest = std::numeric_limits<float>::min();
  return smallest * 0.5f == 0 ? "zero" : "kept";
}

}  // namespace

int main() {
  const auto caller = std::this_thread::get_id();
  const char* during[2][2] = {};
  const char* after[2][2] = {};
  std::vector<std::thread> pool;
  const Executor executor{1, [&](std::function<void()> closure) {
                            pool.emplace_back([closure, &after] {
                              closure();
                              after[1][0] = operand();
                              after[1][1] = result();
                            });
                          }};
  std::atomic<int> started{0};
  run_items(executor, 2, 1, [&](std::int64_t, std::byte*) {
    // Wait for the other thread, so that neither thread takes both items.
    for (++started; started < 2;) std::this_thread::yield();
    const int thread = std::this_thread::get_id() == caller ? 0 : 1;
    during[thread][0] = operand();
    during[thread][1] = result();
  });
  after[0][0] = operand();
  after[0][1] = result();
  for (std::thread& each : pool) each.join();
  for (int thread : {0, 1}) {
    std::printf("%s %s %s %s\n", during[thread][0], during[thread][1], after[thread][0], after[thread][1]);
  }
}
