// The arguments of each op as Python gives them. Its read_arguments(reading, ...) looks at every tensor,
// refuses what memory safety does not allow, fills in the struct, and says what a new output would be like.
#pragma once
#include <cstring>
#include <optional>
#include <string>

#include "binding_tensors.h"
#include "isa.h"
#include "ops.h"

namespace infini {
namespace {

// A weight in blocks with what its bytes do not say; packed where activation_bits is not 0
struct Weight {
    nb::object blocks;
    BlockType type;
    int64_t num_rows;
    int activation_bits;
};

void check_float_rows(const Tensor& x) {
    require(is_float(x.dtype), "expected float32, float16 or bfloat16");
    require(x.ndim >= 1 && has_rows(x), "expected rows: a last dimension that is contiguous");
}

template <class Args>
struct Reading {
    Args args{};
    nb::handle owners[Args::kRoles.tensors] =
        {};                  // whose memory it is; none where an optional tensor is absent
    nb::handle like;         // a new output is laid out like this one; none: contiguous
    bool may_widen = false;  // whether out may be float32 where the result is half precision

    Tensor* tensors() { return reinterpret_cast<Tensor*>(&args); }

    const Tensor& take(Tensor& slot, nb::handle given) {
        slot = tensor(given);
        if (wants_grad() && needs_grad(given))
            refuse("an input needs a gradient, which kernels do not compute");
        owners[&slot - tensors()] = given;
        return slot;
    }

    const Tensor& take_if_any(Tensor& slot, nb::handle given) {
        return given.is_none() ? slot : take(slot, given);
    }

    // The weight of a QuantizedTensor, which holds it as `native`
    const Weight& take_weight(Tensor& slot, nb::handle given) {
        const nb::object native = nb::getattr(given, "native", nb::none());
        const Weight* weight = nullptr;
        if (!nb::try_cast(native, weight) || !weight) throw nb::type_error("expected a quantised weight");
        take(slot, weight->blocks);
        return *weight;
    }

    // Outputs have this dtype and shape
    void promise(DType dtype, const Tensor& shape) {
        for (int i = 0; i < Args::kRoles.outputs; ++i) {
            Tensor& y = tensors()[i];
            y = shape;
            y.data = nullptr, y.dtype = dtype;
        }
    }

    void promise_like(nb::handle owner, const Tensor& x) {
        like = owner;
        promise(x.dtype, x);
    }

    // Rows of floats, which outputs are like
    void take_rows(Tensor& slot, nb::handle given) {
        check_float_rows(take(slot, given));
        promise_like(given, slot);
    }

private:
    bool wants_grad() {
        if (wants_grad_ < 0) wants_grad_ = is_true(g_torch.is_grad_enabled());
        return wants_grad_;
    }
    int wants_grad_ = -1;  // not asked yet
};

void check_vector(const Tensor& v, const Tensor& x) {
    require(v.dtype == x.dtype, "expected the weight in the dtype of the input");
    require(v.ndim == 1 && is_contiguous(v) && v.shape[0] == x.shape[x.ndim - 1],
            "expected a contiguous weight as long as a row, of one dimension");
}

void check_like(const Tensor& other, const Tensor& x) {
    require(other.dtype == x.dtype && same_shape(other, x) && has_rows(other),
            "expected inputs of one dtype and shape, their rows contiguous");
}

// x with rows of another length, as an output is
Tensor with_length(Tensor x, int64_t length) {
    x.shape[x.ndim - 1] = length;
    return x;
}

}  // namespace
}  // namespace infini
