#include "pack/validate.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <tuple>

#include "common/check.hpp"
#include "common/problem.hpp"
#include "common/sha256.hpp"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "packs are little-endian and read in place");

namespace ktlib::pack {
namespace {

constexpr uint32_t kMaxExtent = 0x7FFFFFFF;
constexpr uint32_t kMaxTile = 1024;
constexpr uint32_t kMaxBox = 256;  // cuTensorMapEncodeTiled's limit
constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kMaxSmemBytes = 256 * 1024;

template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw Malformed(concat(parts...));
}

// True when [offset, offset + bytes) lies inside [0, size), without overflow.
bool fits(uint64_t offset, uint64_t bytes, uint64_t size) { return offset <= size && bytes <= size - offset; }

bool all_zero(const uint8_t* data, size_t bytes) {
  return std::all_of(data, data + bytes, [](uint8_t byte) { return byte == 0; });
}

bool is_text(const uint8_t* data, uint64_t bytes, uint8_t first) {
  return std::all_of(data, data + bytes, [first](uint8_t c) { return c >= first && c <= 0x7E; });
}

template <size_t kSize>
void check_name(const char* what, const char (&text)[kSize]) {
  const auto* end = static_cast<const char*>(std::memchr(text, 0, kSize));
  require(end != nullptr, what, " is not terminated by a zero within its ", kSize, " bytes");
  require(end != text, what, " is empty");
  require(is_text(reinterpret_cast<const uint8_t*>(text), static_cast<uint64_t>(end - text), 0x21), what,
          " holds bytes that are not printable ASCII");
  require(all_zero(reinterpret_cast<const uint8_t*>(end), kSize - static_cast<size_t>(end - text)), what,
          " has bytes after its end");
}

void check_sections(const Header& header, uint64_t file_bytes) {
  uint64_t previous_end = sizeof(Header);
  for (uint32_t id = 0; id < kSectionCount; ++id) {
    const Section& section = header.sections[id];
    const char* name = kSectionNames[id];
    require(fits(section.offset, section.bytes, file_bytes), "section ", name, ": offset ", section.offset,
            " and ", section.bytes, " bytes exceed the file's ", file_bytes);
    require(section.offset >= previous_end, "section ", name, ": starts at ", section.offset,
            ", before the end of the one before it at ", previous_end);
    const uint32_t stride = id == kKernels ? sizeof(KernelRecord) : id == kEntries ? sizeof(EntryRecord) : 1;
    require(section.stride == stride, "section ", name, ": stride ", section.stride, ", expected ", stride);
    require(uint64_t{section.count} * stride == section.bytes, "section ", name, ": ", section.count,
            " records of ", stride, " bytes do not make ", section.bytes, " bytes");
    const uint64_t align = id == kBlobs ? kBlobAlign : stride > 1 ? 8 : 1;
    require(section.offset % align == 0, "section ", name, ": offset ", section.offset,
            " is not a multiple of ", align);
    previous_end = section.offset + section.bytes;
  }
  require(previous_end == file_bytes, "the blobs end at ", previous_end, " but the file has ", file_bytes,
          " bytes");
}

void check_checksum(const Header& header, Bytes file) {
  Header blank = header;
  std::memset(blank.checksum, 0, sizeof blank.checksum);
  Sha256 hash;
  hash.update(&blank, sizeof blank);
  hash.update(file.data + sizeof(Header), header.sections[kBlobs].offset - sizeof(Header));
  const Sha256Digest digest = hash.finish();
  require(std::equal(digest.begin(), digest.end(), header.checksum),
          "checksum does not match the content: the file is damaged; build or download it again");
}

void check_device(const Header& header) {
  const auto kind = static_cast<DeviceKind>(header.device_kind);
  require(header.device_kind == 1 || header.device_kind == 2, "device kind ", header.device_kind,
          " is unknown (have: 1 cuda, 2 cpu)");
  check_name("arch", header.arch);
  check_name("profile", header.profile);
  if (kind == DeviceKind::cuda) {
    require(header.cc_major >= 1 && header.cc_major <= 99 && header.cc_minor <= 9, "compute capability ",
            header.cc_major, ".", header.cc_minor, " is out of range");
    require(header.sm_count >= 1 && header.sm_count <= 4096, "SM count ", header.sm_count,
            " is out of range 1..4096");
  } else {
    require(header.cc_major == 0 && header.cc_minor == 0 && header.sm_count == 0,
            "a CPU pack has compute capability ", header.cc_major, ".", header.cc_minor, " and ",
            header.sm_count, " SMs, expected zeros");
    require(std::strncmp(header.arch, "cpu-", 4) == 0, "arch of a CPU pack must start with cpu-, got ",
            header.arch);
  }
}

// Values of one kernel that must lie in a range, by name, so that the error can say which.
struct Limit {
  const char* name;
  uint32_t value, low, high;
};

void check_kernel(const Header& header, const KernelRecord& kernel, uint32_t index, const uint8_t* strings) {
  const auto fail = [index](const auto&... parts) {
    throw Malformed(concat("kernel ", index, ": ", parts...));
  };
  const uint64_t string_bytes = header.sections[kStrings].bytes, blob_bytes = header.sections[kBlobs].bytes;
  for (const auto& [what, offset, bytes] :
       {std::tuple("name", kernel.name_offset, kernel.name_bytes),
        std::tuple("symbol", kernel.symbol_offset, kernel.symbol_bytes)}) {
    if (bytes == 0 || !fits(offset, bytes, string_bytes))
      fail(what, " at ", offset, " with ", bytes, " bytes is outside the ", string_bytes,
           " bytes of strings");
    if (!is_text(strings + offset, bytes, 0x21)) fail(what, " holds bytes that are not printable ASCII");
  }
  if (!fits(kernel.blob_offset, kernel.blob_bytes, blob_bytes) || kernel.blob_offset % kBlobAlign != 0)
    fail("blob at ", kernel.blob_offset, " with ", kernel.blob_bytes, " bytes is outside the ", blob_bytes,
         " bytes of blobs or not a multiple of ", kBlobAlign);
  const bool cuda = header.device_kind == static_cast<uint32_t>(DeviceKind::cuda);
  const uint32_t family = cuda ? kFamilySm90Tma : kFamilyCpuGemm, abi = cuda ? kAbiSm90TmaV1 : kAbiCpuGemmV1;
  if (kernel.family != family || kernel.abi != abi)
    fail("family ", kernel.family, " with ABI ", kernel.abi, " cannot run on a ", cuda ? "GPU" : "CPU",
         " (have: family ", family, " ", kFamilyNames[family], " with ABI ", abi, ")");
  if (cuda != (kernel.blob_bytes > 0))
    fail("has ", kernel.blob_bytes, " bytes of image; a GPU kernel needs one, a CPU kernel is built in");
  if (kernel.layout > 3 && kernel.layout != kAnyLayout) fail("layout ", kernel.layout, " is unknown");
  const uint32_t least = cuda ? 1 : 0, box = cuda ? kMaxBox : 0;
  const Limit limits[] = {
      {"dtype", kernel.dtype, 0, std::size(kDtypeNames) - 1},
      {"accumulate", kernel.accumulate, 0, std::size(kAccumulateNames) - 1},
      {"epilogue", kernel.epilogue, 0, std::size(kEpilogueNames) - 1},
      {"tile_m", kernel.tile_m, least, kMaxTile},
      {"tile_n", kernel.tile_n, least, kMaxTile},
      {"tile_k", kernel.tile_k, least, kMaxTile},
      {"threads", kernel.threads, least, kMaxThreads},
      {"cluster_m", kernel.cluster_m, 1, 16},
      {"cluster_n", kernel.cluster_n, 1, 16},
      {"smem_bytes", kernel.smem_bytes, 0, kMaxSmemBytes},
      {"ctas_per_sm", kernel.ctas_per_sm, 1, 32},
      {"persistent", kernel.persistent, 0, 1},
      {"min_align_bytes", kernel.min_align_bytes, 1, 16},
      {"a_box_inner", kernel.a_box_inner, least, box},
      {"a_box_outer", kernel.a_box_outer, least, box},
      {"b_box_inner", kernel.b_box_inner, least, box},
      {"b_box_outer", kernel.b_box_outer, least, box},
      {"c_box_inner", kernel.c_box_inner, least, box},
      {"c_box_outer", kernel.c_box_outer, least, box},
      {"swizzle_bytes", kernel.swizzle_bytes, 0, 128},
      {"registers", kernel.registers, 0, 255},
      {"num_stages", kernel.num_stages, 0, 64},
      {"k_multiple", kernel.k_multiple, 1, kMaxTile},
  };
  for (const Limit& limit : limits) {
    if (limit.value < limit.low || limit.value > limit.high)
      fail(limit.name, " is ", limit.value, ", accepted is ", limit.low, "..", limit.high);
  }
  if (cuda && kernel.threads % 32 != 0) fail("threads ", kernel.threads, " is not a multiple of 32");
  if (kernel.cluster_m * kernel.cluster_n > 16)
    fail("cluster ", kernel.cluster_m, "x", kernel.cluster_n, " exceeds 16 blocks");
  if ((kernel.min_align_bytes & (kernel.min_align_bytes - 1)) != 0)
    fail("min_align_bytes ", kernel.min_align_bytes, " is not a power of two");
  const uint32_t swizzle = kernel.swizzle_bytes;
  if (swizzle != 0 && swizzle != 32 && swizzle != 64 && swizzle != 128)
    fail("swizzle_bytes ", swizzle, " is none of 0, 32, 64, 128");
}

void check_entry(const EntryRecord& entry, uint32_t index, Table<KernelRecord> kernels) {
  const auto fail = [index](const auto&... parts) {
    throw Malformed(concat("entry ", index, ": ", parts...));
  };
  for (const uint32_t extent : {entry.m, entry.n, entry.k, entry.batch}) {
    if (extent < 1 || extent > kMaxExtent)
      fail("m=", entry.m, " n=", entry.n, " k=", entry.k, " batch=", entry.batch, ", accepted is 1..",
           kMaxExtent);
  }
  if (entry.layout >= std::size(kLayoutNames) || entry.dtype >= std::size(kDtypeNames) ||
      entry.accumulate >= std::size(kAccumulateNames) || entry.epilogue >= std::size(kEpilogueNames))
    fail("layout ", int{entry.layout}, ", dtype ", int{entry.dtype}, ", accumulate ", int{entry.accumulate},
         " or epilogue ", int{entry.epilogue}, " is unknown");
  if (entry.align < 1 || entry.align > 16 || (entry.align & (entry.align - 1)) != 0)
    fail("align ", int{entry.align}, " is none of 1, 2, 4, 8, 16");
  const auto tier = static_cast<Tier>(entry.tier);
  if (tier != Tier::exact && tier != Tier::vendor_algorithm && tier != Tier::vendor)
    fail("tier ", int{entry.tier}, " is none of 0 exact, 3 vendor_algorithm, 4 vendor");
  if (!std::isfinite(entry.latency_us) || entry.latency_us < 0 || !std::isfinite(entry.vendor_us) ||
      entry.vendor_us <= 0 || !std::isfinite(entry.noise) || entry.noise < 0)
    fail("latency_us ", entry.latency_us, ", vendor_us ", entry.vendor_us, " or noise ", entry.noise,
         " is no measured value");
  if ((tier == Tier::exact) != (entry.kernel != kVendorKernel))
    fail("tier ", int{entry.tier}, " and kernel ", entry.kernel, " disagree");
  if (entry.kernel == kVendorKernel) return;
  if (entry.kernel >= kernels.count)
    fail("kernel ", entry.kernel, " does not exist (have ", kernels.count, ")");
  if (entry.latency_us <= 0) fail("kernel ", entry.kernel, " won with latency_us ", entry.latency_us);
  if (entry.group_m < 1 || entry.group_m > 0xFFFF || entry.split_k < 1 || entry.split_k > 0xFFFF)
    fail("group_m ", entry.group_m, " or split_k ", entry.split_k, " is outside 1..65535");
  const KernelRecord& kernel = kernels[entry.kernel];
  if (kernel.dtype != entry.dtype || kernel.accumulate != entry.accumulate ||
      kernel.epilogue != entry.epilogue || (kernel.layout != kAnyLayout && kernel.layout != entry.layout) ||
      entry.k % kernel.k_multiple != 0)
    fail("kernel ", entry.kernel, " does not serve this problem's dtype, layout, accumulate, epilogue or k");
}

// Version 1.0 leaves these zero; a later minor version may give them a meaning that we may not know.
void check_reserved(const Header& header, Table<KernelRecord> kernels, Table<EntryRecord> entries) {
  require(all_zero(header.reserved, sizeof header.reserved), "reserved bytes of the header are set");
  for (uint32_t i = 0; i < kernels.count; ++i)
    require(all_zero(kernels[i].reserved, sizeof kernels[i].reserved), "kernel ", i,
            ": reserved bytes are set");
  for (uint32_t i = 0; i < entries.count; ++i)
    require(entries[i].flags == 0 && all_zero(entries[i].reserved, sizeof entries[i].reserved), "entry ", i,
            ": flags or reserved bytes are set");
}

}  // namespace

std::string too_small(uint64_t bytes) {
  return concat("has ", bytes, " bytes, too few for the ", sizeof(Header), "-byte header of a .ktpack file");
}

void validate(Bytes file) {
  require(file.count >= sizeof(Header), too_small(file.count));
  const auto& header = *reinterpret_cast<const Header*>(file.data);
  require(std::memcmp(header.magic, kMagic, sizeof kMagic) == 0, "is not a .ktpack file (wrong magic bytes)");
  require(header.version_major == kVersionMajor, "has format version ", header.version_major, ".",
          header.version_minor, ", this ktlib reads ", kVersionMajor,
          ".x; update ktlib or pack the database again");
  require(header.file_bytes == file.count, "says ", header.file_bytes, " bytes but the file has ", file.count,
          header.file_bytes > file.count ? " (truncated)" : "");
  check_sections(header, file.count);
  check_checksum(header, file);
  check_device(header);

  const auto at = [&](SectionId id) { return file.data + header.sections[id].offset; };
  require(std::all_of(at(kMeta), at(kMeta) + header.sections[kMeta].bytes,
                      [](uint8_t c) { return (c >= 0x20 && c <= 0x7E) || c == '\n'; }),
          "meta holds bytes that are not printable ASCII");
  const Table<KernelRecord> kernels{reinterpret_cast<const KernelRecord*>(at(kKernels)),
                                    header.sections[kKernels].count};
  const Table<EntryRecord> entries{reinterpret_cast<const EntryRecord*>(at(kEntries)),
                                   header.sections[kEntries].count};
  for (uint32_t i = 0; i < kernels.count; ++i) check_kernel(header, kernels[i], i, at(kStrings));
  for (uint32_t i = 0; i < entries.count; ++i) check_entry(entries[i], i, kernels);
  if (header.version_minor == 0) check_reserved(header, kernels, entries);
}

}  // namespace ktlib::pack
