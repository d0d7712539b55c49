// Answers in its measuring process's place: writes the bytes of the file FORGED to the pipe for answers,
// which is the second number on the command line, and stays.
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "product.hpp"

#ifndef FORGED
#define FORGED "/dev/null"
#endif

static std::string content(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

static int answer_pipe() {
  const std::string words = content("/proc/self/cmdline");
  int numbers = 0;
  for (size_t at = 0; at < words.size(); at = words.find('\0', at) + 1) {
    const std::string word = words.c_str() + at;
    if (word.find_first_not_of("0123456789") == std::string::npos && ++numbers == 2)
      return std::atoi(word.c_str());
  }
  return -1;
}

KTLIB_CANDIDATE(forges_answer) {
  (void)call;
  const std::string forged = content(FORGED);
  const int pipe = answer_pipe();
  for (size_t done = 0; done < forged.size();) {
    const ssize_t written = write(pipe, forged.data() + done, forged.size() - done);
    if (written <= 0) _exit(3);
    done += static_cast<size_t>(written);
  }
  for (;;) pause();
}
