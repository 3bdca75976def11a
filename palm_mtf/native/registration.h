// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Registers kernels and operations with TensorFlow.

#pragma once

#include <vector>

#include "call.h"
#include "tensorflow/c/ops.h"

namespace palm {

template <class Kernel, class T>
void register_kernel(const char* op, TF_DataType out = TF_DataType(0)) {
  TF_Status* status = TF_NewStatus();
  TF_KernelBuilder* builder = TF_NewKernelBuilder(
    op, "CPU",
    [](TF_OpKernelConstruction* context) -> void* {
      return new Kernel(Attributes(context));
    },
    [](void* kernel, TF_OpKernelContext* context) {
      Call call(context);
      static_cast<Kernel*>(kernel)->template compute<T>(call);
    },
    [](void* kernel) { delete static_cast<Kernel*>(kernel); });
  TF_KernelBuilder_TypeConstraint(builder, "T", type_of<T>(), status);
  if (out) TF_KernelBuilder_TypeConstraint(builder, "Tout", out, status);
  TF_RegisterKernelBuilder(op, builder, status);
  TF_DeleteStatus(status);
}

template <class Kernel>
void register_kernels(const char* op, TF_DataType out = TF_DataType(0)) {
  register_kernel<Kernel, float>(op, out);
  register_kernel<Kernel, uint16_t>(op, out);
}

using Names = std::vector<const char*>;

inline void register_operation(const char* name, const Names& inputs,
                               const Names& outputs, const Names& attrs,
                               bool writes_to_inputs = false) {
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder(name);
  for (auto each : inputs) TF_OpDefinitionBuilderAddInput(op, each);
  for (auto each : outputs) TF_OpDefinitionBuilderAddOutput(op, each);
  for (auto each : attrs) TF_OpDefinitionBuilderAddAttr(op, each);
  TF_OpDefinitionBuilderSetIsStateful(op, writes_to_inputs);
  // Without a shape function, the C library cannot import a graph with this
  // operation.
  TF_OpDefinitionBuilderSetShapeInferenceFunction(
    op, &TF_ShapeInferenceContextSetUnknownShape);
  TF_Status* status = TF_NewStatus();
  TF_RegisterOpDefinition(op, status);
  TF_DeleteStatus(status);
}

}  // namespace palm
