#include "frontends/torch_reduction.hpp"

#include <Python.h>

namespace ktlib::frontends::torch {
namespace {

struct Switch {
  const char* get_name;
  const char* set_name;
  PyObject* get = nullptr;
  PyObject* set = nullptr;
  int inside = 0;
  PyObject* saved = nullptr;  // the arguments that restore the user's value; null: it forbade it already
};

Switch switches[2] = {{"_get_cublas_allow_fp16_reduced_precision_reduction",
                       "_set_cublas_allow_fp16_reduced_precision_reduction"},
                      {"_get_cublas_allow_bf16_reduced_precision_reduction",
                       "_set_cublas_allow_bf16_reduced_precision_reduction"}};

bool find(Switch* found) {
  PyObject* module = PyImport_ImportModule("torch._C");
  if (module == nullptr) return false;
  found->get = PyObject_GetAttrString(module, found->get_name);
  found->set = found->get == nullptr ? nullptr : PyObject_GetAttrString(module, found->set_name);
  Py_DECREF(module);
  if (found->set != nullptr) return true;
  Py_CLEAR(found->get);
  return false;
}

// torch before 2.10 answers with a bool; later ones add whether K may be split, which stays as it is.
PyObject* as_arguments(PyObject* value) {
  if (PyTuple_Check(value)) return Py_NewRef(value);
  return PyTuple_Pack(1, value);
}

PyObject* forbidding(PyObject* saved) {
  const Py_ssize_t count = PyTuple_GET_SIZE(saved);
  PyObject* arguments = PyTuple_New(count);
  if (arguments == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(arguments, i, Py_NewRef(i == 0 ? Py_False : PyTuple_GET_ITEM(saved, i)));
  }
  return arguments;
}

bool set(const Switch& found, PyObject* arguments) {
  PyObject* done = arguments == nullptr ? nullptr : PyObject_CallObject(found.set, arguments);
  Py_XDECREF(done);
  return done != nullptr;
}

bool withdraw(Switch* found) {
  if (found->get == nullptr && !find(found)) return false;
  PyObject* value = PyObject_CallNoArgs(found->get);
  PyObject* saved = value == nullptr ? nullptr : as_arguments(value);
  Py_XDECREF(value);
  if (saved == nullptr) return false;
  const int allowed = PyTuple_GET_SIZE(saved) > 0 ? PyObject_IsTrue(PyTuple_GET_ITEM(saved, 0)) : 0;
  if (allowed == 1) {
    PyObject* arguments = forbidding(saved);
    if (set(*found, arguments)) found->saved = Py_NewRef(saved);
    Py_XDECREF(arguments);
  }
  Py_DECREF(saved);
  return PyErr_Occurred() == nullptr;
}

}  // namespace

bool enter_fp32_reduction(Dtype dtype) {
  Switch& found = switches[dtype == Dtype::bf16 ? 1 : 0];
  if (found.inside == 0 && !withdraw(&found)) return false;
  ++found.inside;
  return true;
}

void leave_fp32_reduction(Dtype dtype) {
  Switch& found = switches[dtype == Dtype::bf16 ? 1 : 0];
  if (--found.inside > 0 || found.saved == nullptr) return;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  if (!set(found, found.saved)) PyErr_WriteUnraisable(found.set);
  Py_CLEAR(found.saved);
  PyErr_Restore(type, value, trace);
}

}  // namespace ktlib::frontends::torch
