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

// Closes the descriptor on every way out.
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

void read_all(const std::string& path, int fd, uint8_t* to, uint64_t size) {
  for (uint64_t done = 0; done < size;) {
    const ssize_t got = ::pread(fd, to + done, size - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno(path, "cannot read the pack");
    if (got == 0) throw PackError(path, "was cut off while it was read; write it again");
    done += static_cast<uint64_t>(got);
  }
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
  // Before the memory is asked for: none can be had for an empty file, and the errno would say nothing
  // useful.
  if (size < sizeof(Header)) throw PackError(path, too_small(size));

  std::shared_ptr<Pack> pack(new Pack(path));
  void* data =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (data == MAP_FAILED) throw_errno(path, "no memory to read the pack into");
  pack->file_ = {static_cast<const uint8_t*>(data), size};
  read_all(path, file.fd, static_cast<uint8_t*>(data), size);
  if (::mprotect(data, size, PROT_READ) != 0) throw_errno(path, "cannot protect the pack's memory");
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

bool Pack::same_bytes(const Pack& other) const {
  return file_.count == other.file_.count && std::memcmp(file_.data, other.file_.data, file_.count) == 0;
}

bool Pack::blob_matches(const KernelRecord& kernel) const {
  const Bytes image = blob(kernel);
  if (image.empty()) return true;
  const Sha256Digest digest = sha256(image.data, image.count);
  return std::equal(digest.begin(), digest.end(), kernel.blob_sha256);
}

}  // namespace ktlib::pack
