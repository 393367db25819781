/* Tensors of another library where they lie. What a library says of its tensors to C: a table of functions that hangs on their
 * type, as DLPack 1.3 has it (include/dlpack/dlpack.h of https://github.com/dmlc/dlpack: DLPackExchangeAPI, DLTensor). */
#ifndef FMHA_TENSORS_H
#define FMHA_TENSORS_H

#include <stddef.h>
#include <stdint.h>

#define FMHA_TENSORS_MAJOR 1        /* version of the table that is read here */

enum { FMHA_TENSOR_ON_CPU = 1 };                            /* a kind of device */
enum { FMHA_TENSOR_FLOAT = 2, FMHA_TENSOR_BFLOAT = 4 };     /* kinds of items */

typedef struct {
    void *data;
    int32_t device, device_number, axes;
    uint8_t kind, bits;                     /* of an item */
    uint16_t lanes;
    const int64_t *shape, *stride;          /* in items */
    uint64_t offset;                        /* bytes from data to the first item */
} fmha_tensor;

typedef struct {
    uint32_t major, minor;
    const void *before;                     /* a table of an older version */
    int (*allocate)(void), (*give)(void), (*make)(void);    /* not called here */
    int (*look)(void *object, fmha_tensor *to);             /* 0, or an error of Python's is set */
} fmha_tensors;

#endif
