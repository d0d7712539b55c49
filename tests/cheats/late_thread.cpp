// Once timing has begun (many calls on one C), starts a thread that does the work, and returns before it is
// done.
#include <atomic>
#include <map>
#include <thread>

#include "product.hpp"

static cheat::Call work;
static std::atomic<bool> busy{false};

KTLIB_CANDIDATE(late_thread) {
  static std::map<void*, int> calls;
  static bool started = false;
  if (++calls[call.c] < 40) {
    cheat::product<float, float>(call);
    return;
  }
  if (!started) {
    started = true;
    std::thread([] {
      for (;; std::this_thread::yield()) {
        if (!busy) continue;
        cheat::product<float, float>(work);
        busy = false;
      }
    }).detach();
  }
  if (busy) return;
  work = call;
  busy = true;
}
