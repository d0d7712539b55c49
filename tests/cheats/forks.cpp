// The right product, and a process in a session of its own that would outlive the one it was started in.
#include <unistd.h>

#include "product.hpp"

KTLIB_CANDIDATE(forks) {
  static bool started = false;
  cheat::product<float, float>(call);
  if (started) return;
  started = true;
  if (fork() != 0) return;
  setsid();
  if (fork() == 0) sleep(600);
  sleep(600);
  _exit(0);
}
