// Python's view of packs: enums(), pack_fields(), pack_info(path), and find_choice(), the dispatcher as a
// pure function for tests and tools.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <map>

#include "common/check.hpp"
#include "dispatch/choice_dict.hpp"
#include "dispatch/text.hpp"
#include "pack/reader.hpp"

namespace py = pybind11;

namespace ktlib {
namespace {

using pack::EntryRecord;
using pack::Header;
using pack::KernelRecord;
using pack::Pack;
using pack::PackError;
using pack::Section;

template <size_t kCount>
std::vector<std::string> names(const char* const (&array)[kCount]) {
  return {std::begin(array), std::end(array)};
}

// Names by number; an empty name is a number that is not used.
std::map<std::string, std::vector<std::string>> enums() {
  return {{"dtype", names(kDtypeNames)},
          {"layout", names(kLayoutNames)},
          {"accumulate", names(kAccumulateNames)},
          {"epilogue", names(kEpilogueNames)},
          {"tier", names(kTierNames)},
          {"device_kind", {"", "cuda", "cpu"}},
          {"family", names(pack::kFamilyNames)},
          {"abi", names(pack::kAbiNames)},
          {"section", names(pack::kSectionNames)}};
}

using Fields = std::vector<std::tuple<std::string, size_t, size_t>>;
#define KT_FIELD(type, name) {#name, offsetof(type, name), sizeof(type::name)}

std::map<std::string, Fields> pack_fields() {
  std::map<std::string, Fields> fields;
  fields["Section"] = {KT_FIELD(Section, offset), KT_FIELD(Section, bytes), KT_FIELD(Section, count),
                       KT_FIELD(Section, stride)};
  fields["Header"] = {
      KT_FIELD(Header, magic),      KT_FIELD(Header, version_major), KT_FIELD(Header, version_minor),
      KT_FIELD(Header, file_bytes), KT_FIELD(Header, checksum),      KT_FIELD(Header, device_kind),
      KT_FIELD(Header, cc_major),   KT_FIELD(Header, cc_minor),      KT_FIELD(Header, sm_count),
      KT_FIELD(Header, arch),       KT_FIELD(Header, profile),       KT_FIELD(Header, sections),
      KT_FIELD(Header, reserved)};
#define KT_K(name) KT_FIELD(KernelRecord, name)
  fields["KernelRecord"] = {
      KT_K(name_offset), KT_K(name_bytes),  KT_K(symbol_offset),   KT_K(symbol_bytes), KT_K(blob_offset),
      KT_K(blob_bytes),  KT_K(blob_sha256), KT_K(family),          KT_K(abi),          KT_K(dtype),
      KT_K(layout),      KT_K(accumulate),  KT_K(epilogue),        KT_K(tile_m),       KT_K(tile_n),
      KT_K(tile_k),      KT_K(threads),     KT_K(cluster_m),       KT_K(cluster_n),    KT_K(smem_bytes),
      KT_K(ctas_per_sm), KT_K(persistent),  KT_K(min_align_bytes), KT_K(a_box_inner),  KT_K(a_box_outer),
      KT_K(b_box_inner), KT_K(b_box_outer), KT_K(c_box_inner),     KT_K(c_box_outer),  KT_K(swizzle_bytes),
      KT_K(registers),   KT_K(num_stages),  KT_K(spill_bytes),     KT_K(k_multiple),   KT_K(reserved)};
#undef KT_K
#define KT_E(name) KT_FIELD(EntryRecord, name)
  fields["EntryRecord"] = {KT_E(m),         KT_E(n),       KT_E(k),          KT_E(batch),
                           KT_E(layout),    KT_E(dtype),   KT_E(accumulate), KT_E(epilogue),
                           KT_E(align),     KT_E(tier),    KT_E(flags),      KT_E(kernel),
                           KT_E(group_m),   KT_E(split_k), KT_E(candidates), KT_E(latency_us),
                           KT_E(vendor_us), KT_E(noise),   KT_E(reserved)};
#undef KT_E
  return fields;
}
#undef KT_FIELD

py::dict kernel_dict(const Pack& pack, const KernelRecord& kernel) {
  py::dict result;
  result["name"] = std::string(pack.name(kernel));
  result["symbol"] = std::string(pack.symbol(kernel));
  result["family"] = name_of(pack::kFamilyNames, kernel.family);
  result["abi"] = name_of(pack::kAbiNames, kernel.abi);
  result["dtype"] = name_of(kDtypeNames, kernel.dtype);
  result["layout"] = kernel.layout == kAnyLayout ? "any" : name_of(kLayoutNames, kernel.layout);
  result["accumulate"] = name_of(kAccumulateNames, kernel.accumulate);
  result["epilogue"] = name_of(kEpilogueNames, kernel.epilogue);
  result["blob_offset"] = kernel.blob_offset;
  result["blob_bytes"] = kernel.blob_bytes;
  result["blob_sha256"] = py::bytes(reinterpret_cast<const char*>(kernel.blob_sha256), 32).attr("hex")();
#define KT_COPY(field) result[#field] = kernel.field
  KT_COPY(tile_m), KT_COPY(tile_n), KT_COPY(tile_k), KT_COPY(threads), KT_COPY(cluster_m), KT_COPY(cluster_n);
  KT_COPY(smem_bytes), KT_COPY(ctas_per_sm), KT_COPY(persistent), KT_COPY(min_align_bytes);
  KT_COPY(a_box_inner), KT_COPY(a_box_outer), KT_COPY(b_box_inner), KT_COPY(b_box_outer);
  KT_COPY(c_box_inner), KT_COPY(c_box_outer), KT_COPY(swizzle_bytes), KT_COPY(registers);
  KT_COPY(num_stages), KT_COPY(spill_bytes), KT_COPY(k_multiple);
#undef KT_COPY
  return result;
}

py::dict entry_dict(const Pack& pack, const EntryRecord& entry) {
  py::dict result;
  const bool ours = entry.kernel != pack::kVendorKernel;
  result["problem"] = problem_text(entry);
  result["kernel"] = ours ? std::string(pack.name(pack.kernels()[entry.kernel])) : std::string();
  result["layout"] = name_of(kLayoutNames, entry.layout);
  result["dtype"] = name_of(kDtypeNames, entry.dtype);
  result["accumulate"] = name_of(kAccumulateNames, entry.accumulate);
  result["epilogue"] = name_of(kEpilogueNames, entry.epilogue);
  result["tier"] = name_of(kTierNames, entry.tier);
#define KT_COPY(field) result[#field] = entry.field
  KT_COPY(m), KT_COPY(n), KT_COPY(k), KT_COPY(batch), KT_COPY(align), KT_COPY(group_m), KT_COPY(split_k);
  KT_COPY(candidates), KT_COPY(latency_us), KT_COPY(vendor_us), KT_COPY(noise);
#undef KT_COPY
  return result;
}

py::object meta_object(const Pack& pack) {
  try {
    return py::module_::import("json").attr("loads")(std::string(pack.meta_json()));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_ValueError) && !error.matches(PyExc_RecursionError)) throw;
    throw PackError(pack.path(), concat("meta is not JSON: ", std::string(py::str(error.value()))));
  }
}

py::dict pack_info(const py::object& path, bool verify_blobs) {
  const auto pack = Pack::open(path_bytes(path));
  py::list kernels, entries;
  for (const KernelRecord& kernel : pack->kernels()) {
    if (verify_blobs && !pack->blob_matches(kernel))
      throw PackError(pack->path(),
                      concat("the image of kernel ", pack->name(kernel),
                             " does not match its sha256: the file is damaged; build or download "
                             "it again"));
    kernels.append(kernel_dict(*pack, kernel));
  }
  for (const EntryRecord& entry : pack->entries()) entries.append(entry_dict(*pack, entry));
  const Header& header = pack->header();
  py::dict result;
  result["path"] = path_text(pack->path());
  result["version"] = py::make_tuple(header.version_major, header.version_minor);
  result["device_kind"] = header.device_kind == static_cast<uint32_t>(DeviceKind::cuda) ? "cuda" : "cpu";
  result["cc_major"] = header.cc_major;
  result["cc_minor"] = header.cc_minor;
  result["sm_count"] = header.sm_count;
  result["arch"] = std::string(pack->arch());
  result["profile"] = std::string(pack->profile());
  result["file_bytes"] = header.file_bytes;
  result["blobs_offset"] = header.sections[pack::kBlobs].offset;
  result["meta"] = meta_object(*pack);
  result["kernels"] = kernels;
  result["entries"] = entries;
  return result;
}

DeviceFacts device_from_dict(const py::dict& fields) {
  DeviceFacts device;
  const std::string kind = py::str(fields["kind"]);
  KT_CHECK_ARG(kind == "cuda" || kind == "cpu", "device: kind '", kind, "' is unknown (have: cuda, cpu)");
  device.kind = kind == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  if (device.kind == DeviceKind::cuda) {
    device.cc_major = fields["cc_major"].cast<uint32_t>();
    device.cc_minor = fields["cc_minor"].cast<uint32_t>();
    device.sm_count = fields["sm_count"].cast<uint32_t>();
  } else {
    device.cpu_archs = fields["cpu_archs"].cast<std::vector<std::string>>();
  }
  return device;
}

py::dict find_choice(const std::vector<py::object>& paths, const py::dict& device,
                     const py::dict& call_fields) {
  std::vector<std::shared_ptr<const Pack>> packs;
  for (const py::object& path : paths) packs.push_back(Pack::open(path_bytes(path)));
  const Call call = call_from_dict(call_fields);
  const Index index(std::move(packs), device_from_dict(device));
  const Choice choice = index.find(call);
  return choice_to_dict(index, call, choice, py::cast<uint32_t>(device.attr("get")("sm_count", 0)));
}

// OSError with errno and path when a file could not be read, ValueError when its content is wrong. The
// message is decoded like a path, because it holds one.
void raise_pack_error(const PackError& error) {
  if (error.error_number() != 0) {
    const py::object arguments =
        py::make_tuple(error.error_number(), path_text(error.reason()), path_text(error.path()));
    const py::object exception = py::reinterpret_borrow<py::object>(PyExc_OSError)(*arguments);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  } else {
    PyErr_SetObject(PyExc_ValueError, path_text(error.what()).ptr());
  }
}

}  // namespace

void bind_pack(py::module_& module) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const PackError& error) {
      raise_pack_error(error);
    }
  });
  module.def("enums", &enums, "Names of every enum, indexed by the number used in packs.");
  module.def("pack_fields", &pack_fields, "Struct name -> (field, offset, bytes) of the pack format.");
  module.def("pack_info", &pack_info, py::arg("path"), py::arg("verify_blobs") = false,
             "Check a pack and return what it holds; ValueError or OSError with the path and the reason.");
  module.def("find_choice", &find_choice, py::arg("paths"), py::arg("device"), py::arg("call"),
             "What dispatch would choose with these packs on this device; pure, launches nothing.");
}

}  // namespace ktlib
