#include "launch/bind_dispatch.hpp"

#include <pybind11/stl.h>

#include "common/check.hpp"
#include "dispatch/choice_dict.hpp"
#include "launch/prepare.hpp"
#include "launch/registry.hpp"

namespace py = pybind11;

namespace ktlib {
namespace {

py::dict vendor(const std::string& reason) {
  py::dict result;
  result["kernel"] = "";
  result["tier"] = "vendor";
  result["reason"] = path_text(reason);
  result["database"] = "";
  result["launch"] = py::dict();
  result["latency_us"] = py::none();
  result["vendor_us"] = py::none();
  return result;
}

// What matmul would do with `call`: the index's answer, unless what it names cannot run here.
py::dict explain_on(const Call& call, DeviceKind kind, int device) {
  const Registry* registry = Registry::current();
  if (registry == nullptr) return vendor("no database is loaded");
  std::string reason;
  const DeviceIndex* index = kind == DeviceKind::cpu ? &registry->cpu() : registry->cuda(device, &reason);
  if (index == nullptr) return vendor(reason);
  const Choice choice = index->index().find(call);
  if (choice.kernel != nullptr) {
    const KernelSlot& slot = index->slot(choice);
    if (slot.cuda != nullptr && !slot.cuda->failure(device).empty())
      return vendor(slot.cuda->failure(device));
    if (slot.cuda == nullptr && slot.cpu == nullptr) {
      return vendor(concat("kernel ", choice.pack->name(*choice.kernel), " is not in this build of ktlib"));
    }
  }
  return choice_to_dict(index->index(), call, choice, index->facts().sm_count);
}

py::dict explain(const py::dict& fields) {
  const Call call = call_from_dict(fields);
  const std::string device = fields.contains("device") ? std::string(py::str(fields["device"])) : "cpu";
  if (device == "cpu") return explain_on(call, DeviceKind::cpu, 0);
  const bool is_cuda = device.rfind("cuda:", 0) == 0 && device.size() > 5 && device.size() < 9 &&
                       device.find_first_not_of("0123456789", 5) == std::string::npos;
  KT_CHECK_ARG(is_cuda, "call: device '", device, "' is unknown (have: cpu, cuda:0, cuda:1, ...)");
  return explain_on(call, DeviceKind::cuda, std::stoi(device.substr(5)));
}

py::tuple explain_call(const py::object& a, const py::object& b, const py::object& out, bool enabled) {
  using frontends::Reason;
  Prepared prepared;
  Reason reason = Reason::disabled;
  if (enabled) reason = prepare(a.ptr(), b.ptr(), out.is_none() ? nullptr : out.ptr(), &prepared);
  if (reason != Reason::none) {
    const char* text = frontends::reason_text(reason);
    return py::make_tuple(py::str(text), vendor(text));
  }
  return py::make_tuple("", explain_on(prepared.call, prepared.device_kind, prepared.device));
}

py::list packs() {
  py::list result;
  const Registry* registry = Registry::current();
  if (registry == nullptr) return result;
  for (const auto& open : registry->packs()) {
    const pack::Pack* pack = open->pack().get();
    py::dict one;
    const pack::Header& header = pack->header();
    one["path"] = path_text(pack->path());
    one["profile"] = std::string(pack->profile());
    one["arch"] = std::string(pack->arch());
    one["device_kind"] = header.device_kind == static_cast<uint32_t>(DeviceKind::cpu) ? "cpu" : "cuda";
    one["sm_count"] = header.sm_count;
    one["kernels"] = pack->kernels().count;
    one["entries"] = pack->entries().count;
    result.append(one);
  }
  return result;
}

// Loads every CUDA kernel of the packs that fit `device`; returns how many and what failed.
py::tuple preload(int device) {
  const Registry* registry = Registry::current();
  std::string reason;
  const DeviceIndex* index = registry == nullptr ? nullptr : registry->cuda(device, &reason);
  if (index == nullptr) throw std::runtime_error(reason.empty() ? "no database is loaded" : reason);
  int loaded = 0;
  std::vector<std::string> failures;
  {
    py::gil_scoped_release release;
    for (const std::vector<KernelSlot>* slots : index->kernels()) {
      for (const KernelSlot& slot : *slots) {
        if (slot.cuda == nullptr) continue;
        std::string failure;
        bool first_time = false;
        if (slot.cuda->load(device, nullptr, &failure, &first_time) == CudaKernel::Result::ok) {
          ++loaded;
        } else {
          failures.push_back(failure);
        }
      }
    }
  }
  return py::make_tuple(loaded, failures);
}

}  // namespace

void bind_dispatch(py::module_& module, const std::atomic<bool>& enabled) {
  module.def("set_packs", [](const std::vector<py::object>& paths) {
    std::vector<std::string> bytes;
    for (const py::object& path : paths) bytes.push_back(path_bytes(path));
    py::list warnings;
    for (const std::string& warning : Registry::set_packs(bytes)) warnings.append(path_text(warning));
    return warnings;
  });
  module.def("add_pack", [](const py::object& path) { Registry::add_pack(path_bytes(path)); });
  module.def("packs", &packs);
  module.def("explain", &explain, py::arg("call"));
  module.def("explain_call", [&enabled](const py::object& a, const py::object& b, const py::object& out) {
    return explain_call(a, b, out, enabled.load(std::memory_order_relaxed));
  });
  module.def("preload", &preload, py::arg("device"));
}

}  // namespace ktlib
