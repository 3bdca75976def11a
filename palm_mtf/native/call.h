// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Attributes, inputs and outputs of a TensorFlow operation.

#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "tensorflow/c/kernels.h"

namespace palm {

class Attributes {
 public:
  explicit Attributes(TF_OpKernelConstruction* context) : context_(context) {}
  Attributes(const Attributes&) = delete;
  ~Attributes() {
    if (TF_GetCode(status_) != TF_OK)
      TF_OpKernelConstruction_Failure(context_, status_);
    TF_DeleteStatus(status_);
  }

  int number(const char* name) const {
    int32_t value = 0;
    TF_OpKernelConstruction_GetAttrInt32(context_, name, &value, status_);
    return value;
  }
  std::vector<int> numbers(const char* name) const {
    int32_t size = 0, unused = 0;
    TF_OpKernelConstruction_GetAttrSize(context_, name, &size, &unused, status_);
    std::vector<int> values(size);
    TF_OpKernelConstruction_GetAttrInt32List(context_, name, values.data(), size,
                                             status_);
    return values;
  }
  float real(const char* name) const {
    float value = 0;
    TF_OpKernelConstruction_GetAttrFloat(context_, name, &value, status_);
    return value;
  }
  bool flag(const char* name) const {
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
  if (std::is_same_v<T, int32_t>) return TF_INT32;
  if (sizeof(T) == 1) return TF_UINT8;
  return sizeof(T) == 2 ? TF_BFLOAT16 : TF_FLOAT;
}

template <class T>
struct Matrix {
  T* data;
  int rows, columns;

  T* row(int i) const { return data + size_t(i) * columns; }
};

// One call of an operation. The destructor releases the call's tensors.
class Call {
 public:
  explicit Call(TF_OpKernelContext* context) : context_(context) {}
  Call(const Call&) = delete;
  ~Call() {
    for (TF_Tensor* each : inputs_) TF_DeleteTensor(each);
    for (TF_Tensor* each : outputs_) TF_DeleteTensor(each);
    TF_DeleteStatus(status_);
  }

  int num_inputs() const { return TF_NumInputs(context_); }
  bool has_next() const { return int(inputs_.size()) < num_inputs(); }

  // Each call of a function next*() returns the operation's next input.
  TF_Tensor* next() {
    TF_Tensor* tensor = nullptr;
    TF_GetInput(context_, int(inputs_.size()), &tensor, status_);
    inputs_.push_back(tensor);
    return tensor;
  }
  template <class T>
  T* next_data() {
    return static_cast<T*>(TF_TensorData(next()));
  }
  template <class T>
  std::vector<T> next_values() {
    TF_Tensor* tensor = next();
    const T* data = static_cast<T*>(TF_TensorData(tensor));
    return std::vector<T>(data, data + TF_TensorElementCount(tensor));
  }
  template <class T>
  Matrix<T> next_matrix() {
    TF_Tensor* tensor = next();
    return {static_cast<std::remove_const_t<T>*>(TF_TensorData(tensor)),
            int(TF_Dim(tensor, 0)), int(TF_Dim(tensor, 1))};
  }

  int last_rank() const { return TF_NumDims(inputs_.back()); }

  // Uses the input that was read last as an output, to be written in place.
  void give_last(int output) {
    TF_SetOutput(context_, output, inputs_.back(), status_);
  }
  // Makes an output with a copy of the next input.
  template <class T>
  Matrix<T> copy_next(int output) {
    const TF_Tensor* from = next();
    T* to = allocate_like<T>(output, from);
    std::memcpy(to, TF_TensorData(from), TF_TensorByteSize(from));
    const int rank = TF_NumDims(from);
    return {to, rank > 0 ? int(TF_Dim(from, 0)) : 1,
            rank > 1 ? int(TF_Dim(from, 1)) : 1};
  }
  template <class T>
  T* allocate_like(int output, const TF_Tensor* like) {
    std::vector<int64_t> dims(TF_NumDims(like));
    for (int i = 0; i < int(dims.size()); ++i) dims[i] = TF_Dim(like, i);
    return allocate<T>(output, TF_TensorType(like), dims.data(), dims.size());
  }
  template <class T>
  Matrix<T> allocate(int output, int rows, int columns) {
    int64_t dims[] = {rows, columns};
    return {allocate<T>(output, type_of<T>(), dims, 2), rows, columns};
  }
  void fail(const char* message) {
    TF_SetStatus(status_, TF_INVALID_ARGUMENT, message);
    TF_OpKernelContext_Failure(context_, status_);
  }

 private:
  template <class T>
  T* allocate(int output, TF_DataType type, const int64_t* dims, int rank) {
    size_t size = sizeof(T);
    for (int i = 0; i < rank; ++i) size *= dims[i];
    outputs_.push_back(TF_AllocateOutput(context_, output, type, dims, rank,
                                         size, status_));
    return static_cast<T*>(TF_TensorData(outputs_.back()));
  }

  TF_OpKernelContext* context_;
  TF_Status* status_ = TF_NewStatus();
  std::vector<TF_Tensor*> inputs_, outputs_;
};

}  // namespace palm
