// Ops on numbers by themselves, with the bits of kernels/src/cpu/elementwise.
#pragma once
#include "common.cuh"

enum Op : unsigned {
  NEG, ABS, SIGN, SQUARE, FLOOR, CEIL, ROUND, TRUNC, SQRT, RSQRT, RECIPROCAL, BITWISE_NOT,
  // of two
  ADD, SUB, MUL, DIV, MAXIMUM, MINIMUM, FLOOR_DIVIDE, REMAINDER, BITWISE_AND, BITWISE_OR, BITWISE_XOR, LEFT_SHIFT, RIGHT_SHIFT,
  // bytes, of one and of two
  LOGICAL_NOT, IS_NAN, IS_INF, IS_FINITE,
  EQUAL, NOT_EQUAL, LESS, LESS_EQUAL, GREATER, GREATER_EQUAL, LOGICAL_AND, LOGICAL_OR, LOGICAL_XOR,
};

DEVICE bool is_of_one(unsigned op) { return op <= BITWISE_NOT || (op >= LOGICAL_NOT && op <= IS_FINITE); }
DEVICE bool is_predicate(unsigned op) { return op >= LOGICAL_NOT; }

DEVICE float magnitude(float x) { return fabsf(x); }
DEVICE double magnitude(double x) { return fabs(x); }
DEVICE float root(float x) { return sqrtf(x); }
DEVICE double root(double x) { return sqrt(x); }
DEVICE float down(float x) { return floorf(x); }
DEVICE double down(double x) { return floor(x); }
DEVICE float up(float x) { return ceilf(x); }
DEVICE double up(double x) { return ceil(x); }
DEVICE float even(float x) { return rintf(x); }
DEVICE double even(double x) { return rint(x); }
DEVICE float cut(float x) { return truncf(x); }
DEVICE double cut(double x) { return trunc(x); }

/// An op whose result is a number.
template <class T> DEVICE T float_op(unsigned op, T x, T y) {
  switch (op) {
    case NEG: return -x;
    case ABS: return magnitude(x);
    case SIGN: return x > T(0) ? T(1) : x < T(0) ? T(-1) : x;
    case SQUARE: return x * x;
    case FLOOR: return down(x);
    case CEIL: return up(x);
    case ROUND: return even(x);
    case TRUNC: return cut(x);
    case SQRT: return root(x);
    case RSQRT: return T(1) / root(x);
    case RECIPROCAL: return T(1) / x;
    case ADD: return x + y;
    case SUB: return x - y;
    case MUL: return x * y;
    case DIV: return x / y;
    case MAXIMUM: return x > y || x != x ? x : y;
    case MINIMUM: return x < y || x != x ? x : y;
    case FLOOR_DIVIDE: return down(x / y);
    default: return T(0);
  }
}
