// What a file of an instruction set publishes.
#pragma once
#include "attention.h"
#include "head.h"
#include "stack.h"

namespace {

constexpr mindstream::Kernels kernel_table(const char *name) {
  return {name, kTile, row_bytes, {attention_items, run_attention}, {stack_items, run_stack}, {head_items, run_head}, matmul_items};
}

}  // namespace
