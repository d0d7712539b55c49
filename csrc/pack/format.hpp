// The .ktpack file, byte by byte. Little-endian, flat, used as read; generator/pack.py writes it and a test
// compares the two field by field. A reader refuses another major version and ignores nothing else silently.
//
//   header | meta (JSON) | strings | kernels | entries | model | blobs
//
// `checksum` is sha256 over the header with the checksum bytes zero, followed by everything from the header's
// end to the first byte of the blobs. Each blob carries its own sha256, checked when it is loaded, so opening
// a pack never reads the cubins.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktlib::pack {

inline constexpr char kMagic[8] = {'K', 'T', 'L', 'P', 'A', 'C', 'K', '\n'};
inline constexpr uint32_t kVersionMajor = 1;
inline constexpr uint32_t kVersionMinor = 0;
inline constexpr uint32_t kVendorKernel = 0xFFFFFFFF;  // EntryRecord::kernel: the vendor won
inline constexpr uint32_t kBlobAlign = 64;

enum SectionId : uint32_t { kMeta = 0, kStrings, kKernels, kEntries, kModel, kBlobs, kSectionCount };

// Numbers of KernelRecord::family and ::abi; the names are KernelFacts.family and .abi.
enum FamilyId : uint32_t { kFamilySm90Tma = 1, kFamilyCpuGemm = 2 };
enum AbiId : uint32_t { kAbiSm90TmaV1 = 1, kAbiCpuGemmV1 = 2 };

struct Section {
  uint64_t offset;  // from the start of the file
  uint64_t bytes;
  uint32_t count;   // records (bytes for meta, strings, blobs)
  uint32_t stride;  // bytes a record (1 for the others)
};
static_assert(sizeof(Section) == 24);

struct Header {
  char magic[8];
  uint32_t version_major, version_minor;
  uint64_t file_bytes;
  uint8_t checksum[32];
  uint32_t device_kind;                   // DeviceKind
  uint32_t cc_major, cc_minor, sm_count;  // zero for a CPU
  char arch[32];                          // "sm90a", "cpu-x86_64_v3"; zero-terminated
  char profile[64];                       // "sm90a-132"; zero-terminated
  Section sections[kSectionCount];
  uint8_t reserved[512 - 312];
};
static_assert(sizeof(Header) == 512 && offsetof(Header, sections) == 168);

// A kernel: what a launch must know. `name` is the variant's text without run-time parameters. blob_bytes is
// zero for a kernel compiled into the extension, which is found by name.
struct KernelRecord {
  uint32_t name_offset, name_bytes, symbol_offset, symbol_bytes;  // in strings
  uint64_t blob_offset, blob_bytes;                               // in blobs
  uint8_t blob_sha256[32];
  uint32_t family, abi;
  uint32_t dtype, layout, accumulate, epilogue;  // layout may be kAnyLayout
  uint32_t tile_m, tile_n, tile_k;
  uint32_t threads, cluster_m, cluster_n;
  uint32_t smem_bytes, ctas_per_sm, persistent, min_align_bytes;
  uint32_t a_box_inner, a_box_outer, b_box_inner, b_box_outer, c_box_inner, c_box_outer;
  uint32_t swizzle_bytes, registers, num_stages, spill_bytes, k_multiple;
  uint8_t reserved[256 - 172];
};
static_assert(sizeof(KernelRecord) == 256 && offsetof(KernelRecord, family) == 64);

// A tuned problem and what won it.
struct EntryRecord {
  uint32_t m, n, k, batch;
  uint8_t layout, dtype, accumulate, epilogue, align, tier;  // tier: exact, vendor_algorithm or vendor
  uint16_t flags;
  uint32_t kernel;  // index in kernels, or kVendorKernel
  uint32_t group_m, split_k;
  uint32_t candidates;  // how many were measured
  float latency_us;     // of the best kernel of ours, also where the vendor won (0 when none was right)
  float vendor_us;      // measured interleaved with it
  float noise;          // relative
  uint8_t reserved[64 - 52];
};
static_assert(sizeof(EntryRecord) == 64);

}  // namespace ktlib::pack
