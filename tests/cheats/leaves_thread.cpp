// Computes the product and leaves a thread behind that could go on working outside the timing.
#include <chrono>
#include <thread>

#include "product.hpp"

KTLIB_CANDIDATE(leaves_thread) {
  static bool started = false;
  cheat::product<float, float>(call);
  if (!started) {
    started = true;
    std::thread([] { std::this_thread::sleep_for(std::chrono::hours(1)); }).detach();
  }
}
