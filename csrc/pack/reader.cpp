#include "pack/reader.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "common/sha256.hpp"
#include "pack/validate.hpp"

namespace ktlib::pack {
namespace {

// Closes the descriptor on every way out; a mapping outlives its descriptor.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

[[noreturn]] void throw_errno(const std::string& path, const char* what) {
  const int error = errno;
  throw PackError(path, std::string(what) + ": " + std::strerror(error), error);
}

// A tuning database is HDF5 behind a seal of 512 bytes; other HDF5 files begin at once.
bool is_hdf5(Bytes file) {
  constexpr char kSignature[] = "\x89HDF\r\n\x1a\n";
  constexpr size_t kBytes = sizeof kSignature - 1;
  for (const size_t offset : {0, 512}) {
    if (file.count >= offset + kBytes && std::memcmp(file.data + offset, kSignature, kBytes) == 0)
      return true;
  }
  return false;
}

}  // namespace

std::shared_ptr<const Pack> Pack::open(const std::string& path) {
  if (path.find('\0') != std::string::npos) throw PackError(path, "the path holds a zero byte", EINVAL);
  // O_NONBLOCK: a FIFO must be refused, not waited for. It changes nothing for a regular file.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) throw_errno(path, "cannot open the pack");
  struct stat info {};
  if (::fstat(file.fd, &info) != 0) throw_errno(path, "cannot read the pack's size");
  if (S_ISDIR(info.st_mode)) throw PackError(path, "is a folder, expected a .ktpack file", EISDIR);
  if (!S_ISREG(info.st_mode)) throw PackError(path, "is not a regular file, expected a .ktpack file", EINVAL);
  const auto size = static_cast<uint64_t>(info.st_size);
  // Before mapping: an empty file cannot be mapped, and the errno would say nothing useful.
  if (size < sizeof(Header)) throw PackError(path, too_small(size));

  std::shared_ptr<Pack> pack(new Pack(path));
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (data == MAP_FAILED) throw_errno(path, "cannot map the pack into memory");
  pack->file_ = {static_cast<const uint8_t*>(data), size};
  if (is_hdf5(pack->file_)) {
    throw PackError(path, "this is a tuning database; make a pack of it: ktlib-build pack " + path);
  }
  try {
    validate(pack->file_);
  } catch (const Malformed& problem) {
    throw PackError(path, problem.what());
  }
  return pack;
}

Pack::~Pack() {
  if (file_.data != nullptr) ::munmap(const_cast<uint8_t*>(file_.data), file_.count);
}

bool Pack::blob_matches(const KernelRecord& kernel) const {
  const Bytes image = blob(kernel);
  if (image.empty()) return true;
  const Sha256Digest digest = sha256(image.data, image.count);
  return std::equal(digest.begin(), digest.end(), kernel.blob_sha256);
}

}  // namespace ktlib::pack
