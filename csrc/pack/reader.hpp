// Opens a .ktpack (pack/format.hpp): read into memory, checked completely before anything is handed out.
// After open() every offset, index and enum in the tables is in range, so users of a Pack check nothing
// again.
//
// The memory is a read-only copy, not a mapping of the file: whoever truncates or rewrites the file later
// changes nothing that was checked.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "pack/format.hpp"

namespace ktlib::pack {

// Indexed by the numbers in packs; zero is no family and no ABI.
inline constexpr const char* kFamilyNames[] = {"", "sm90_tma", "cpu_gemm"};
inline constexpr const char* kAbiNames[] = {"", "sm90_tma_v1", "cpu_gemm_v1"};
inline constexpr const char* kSectionNames[] = {"meta", "strings", "kernels", "entries", "model", "blobs"};

// A pack that cannot be used: what() is "path: reason". error_number() is errno when the file could not be
// read, and zero when its content is wrong.
class PackError : public std::runtime_error {
 public:
  PackError(const std::string& path, const std::string& reason, int error_number = 0)
      : std::runtime_error(path + ": " + reason), path_(path), reason_(reason), error_number_(error_number) {}
  const std::string& path() const { return path_; }
  const std::string& reason() const { return reason_; }
  int error_number() const { return error_number_; }

 private:
  std::string path_, reason_;
  int error_number_;
};

// A read-only view of `count` consecutive values inside the copy.
template <typename T>
struct Table {
  const T* data = nullptr;
  uint64_t count = 0;
  const T* begin() const { return data; }
  const T* end() const { return data + count; }
  const T& operator[](uint64_t i) const { return data[i]; }
  bool empty() const { return count == 0; }
};
using Bytes = Table<uint8_t>;

class Pack {
 public:
  // Throws PackError. The path's bytes go to the system as they are.
  static std::shared_ptr<const Pack> open(const std::string& path);
  ~Pack();
  Pack(const Pack&) = delete;
  Pack& operator=(const Pack&) = delete;

  const std::string& path() const { return path_; }
  bool same_bytes(const Pack& other) const;
  const Header& header() const { return *reinterpret_cast<const Header*>(file_.data); }
  std::string_view arch() const { return header().arch; }
  std::string_view profile() const { return header().profile; }
  Table<KernelRecord> kernels() const { return table<KernelRecord>(kKernels); }
  Table<EntryRecord> entries() const { return table<EntryRecord>(kEntries); }
  std::string_view meta_json() const { return text(kMeta, 0, header().sections[kMeta].bytes); }
  std::string_view name(const KernelRecord& kernel) const {
    return text(kStrings, kernel.name_offset, kernel.name_bytes);
  }
  std::string_view symbol(const KernelRecord& kernel) const {
    return text(kStrings, kernel.symbol_offset, kernel.symbol_bytes);
  }
  // The image, 64-byte aligned; empty for a kernel compiled into the extension. Its content is only known to
  // be right after blob_matches(): open() does not check the blobs.
  Bytes blob(const KernelRecord& kernel) const {
    return {file_.data + header().sections[kBlobs].offset + kernel.blob_offset, kernel.blob_bytes};
  }
  bool blob_matches(const KernelRecord& kernel) const;

 private:
  explicit Pack(std::string path) : path_(std::move(path)) {}
  template <typename T>
  Table<T> table(SectionId id) const {
    const Section& section = header().sections[id];
    return {reinterpret_cast<const T*>(file_.data + section.offset), section.count};
  }
  std::string_view text(SectionId id, uint64_t offset, uint64_t bytes) const {
    return {reinterpret_cast<const char*>(file_.data + header().sections[id].offset + offset), bytes};
  }

  std::string path_;
  Bytes file_;
};

}  // namespace ktlib::pack
