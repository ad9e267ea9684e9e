// Elementary functions by their numbers, with the bits of kernels/src/cpu/math.
#pragma once
#include "math.cuh"

enum Function : unsigned {
  EXP, EXPM1, LOG, LOG1P, LOG2, SIN, COS, TAN, ASIN, ACOS, ATAN, SINH, COSH, TANH, ASINH, ACOSH, ATANH, ERF, ERFINV, SIGMOID, SILU,
  // of two
  POW, ATAN2, LOGADDEXP,
};

DEVICE float called(unsigned op, float x, float y) {
  switch (op) {
    case EXP: return math::exp(x);
    case EXPM1: return math::expm1(x);
    case LOG: return math::log(x);
    case LOG1P: return math::log1p(x);
    case LOG2: return math::log2(x);
    case SIN: return math::sin(x);
    case COS: return math::cos(x);
    case TAN: return math::tan(x);
    case ASIN: return math::asin(x);
    case ACOS: return math::acos(x);
    case ATAN: return math::atan(x);
    case SINH: return math::sinh(x);
    case COSH: return math::cosh(x);
    case TANH: return tanh_f32(x);
    case ASINH: return math::asinh(x);
    case ACOSH: return math::acosh(x);
    case ATANH: return math::atanh(x);
    case ERF: return math::erf(x);
    case ERFINV: return math::erfinv(x);
    case SIGMOID: return math::sigmoid(x);
    case SILU: return math::silu(x);
    case POW: return math::pow(x, y);
    case ATAN2: return math::atan2(x, y);
    case LOGADDEXP: return math::logaddexp(x, y);
    default: return quiet_nan();
  }
}
