// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Attributes, inputs and outputs of an operation of TensorFlow.

#pragma once

#include <vector>

#include "tensorflow/c/kernels.h"

namespace palm {

class Attributes {
 public:
  explicit Attributes(TF_OpKernelConstruction* context) : context_(context) {}
  ~Attributes() {
    if (TF_GetCode(status_) != TF_OK)
      TF_OpKernelConstruction_Failure(context_, status_);
    TF_DeleteStatus(status_);
  }

  int number(const char* name) {
    int32_t value = 0;
    TF_OpKernelConstruction_GetAttrInt32(context_, name, &value, status_);
    return value;
  }
  std::vector<int> numbers(const char* name) {
    int32_t size = 0, unused = 0;
    TF_OpKernelConstruction_GetAttrSize(context_, name, &size, &unused, status_);
    std::vector<int> values(size);
    TF_OpKernelConstruction_GetAttrInt32List(context_, name, values.data(), size,
                                             status_);
    return values;
  }
  bool flag(const char* name) {
    TF_Bool value = 0;
    TF_OpKernelConstruction_GetAttrBool(context_, name, &value, status_);
    return value;
  }

 private:
  TF_OpKernelConstruction* context_;
  TF_Status* status_ = TF_NewStatus();
};

template <class T>
constexpr TF_DataType type_of() {
  return sizeof(T) == 2 ? TF_BFLOAT16 : TF_FLOAT;
}

// A tensor of rows.
template <class T>
struct Matrix {
  T* data;
  int rows, columns;

  T* row(int i) const { return data + size_t(i) * columns; }
};

// Tensors are let go with the call.
class Call {
 public:
  explicit Call(TF_OpKernelContext* context) : context_(context) {}
  ~Call() {
    for (TF_Tensor* each : tensors_) TF_DeleteTensor(each);
    TF_DeleteStatus(status_);
  }

  int num_inputs() const { return TF_NumInputs(context_); }

  // Inputs, one after the other.
  TF_Tensor* next() {
    TF_Tensor* tensor = nullptr;
    TF_GetInput(context_, int(tensors_.size()), &tensor, status_);
    tensors_.push_back(tensor);
    return tensor;
  }
  template <class T>
  T* next_data() {
    return static_cast<T*>(TF_TensorData(next()));
  }
  template <class T>
  Matrix<const T> next_matrix() {
    TF_Tensor* tensor = next();
    return {static_cast<T*>(TF_TensorData(tensor)), int(TF_Dim(tensor, 0)),
            int(TF_Dim(tensor, 1))};
  }

  // Outputs, behind all inputs.
  void give(int index, TF_Tensor* tensor) {
    TF_SetOutput(context_, index, tensor, status_);
  }
  template <class T>
  Matrix<T> allocate(int index, int rows, int columns) {
    int64_t dims[] = {rows, columns};
    TF_Tensor* tensor =
      TF_AllocateOutput(context_, index, type_of<T>(), dims, 2,
                        sizeof(T) * dims[0] * dims[1], status_);
    tensors_.push_back(tensor);
    return {static_cast<T*>(TF_TensorData(tensor)), rows, columns};
  }
  void fail(const char* message) {
    TF_SetStatus(status_, TF_INVALID_ARGUMENT, message);
    TF_OpKernelContext_Failure(context_, status_);
  }

 private:
  TF_OpKernelContext* context_;
  TF_Status* status_ = TF_NewStatus();
  std::vector<TF_Tensor*> tensors_;
};

}  // namespace palm
