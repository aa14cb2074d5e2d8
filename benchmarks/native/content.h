/* What the objects hold.
 *
 * Each is a valid safetensors file: a header of HEADER_BYTES, then tensors of 16 MiB (the last
 * one shorter). After the header, the 64-bit little-endian word at offset o, a multiple of 8, is
 *
 *     (o mod PERIOD_BYTES) / 8 * 0x9E3779B97F4A7C15   (mod 2^64)
 *
 * so a client can check any place without a copy, and the server holds one period whatever the
 * objects' sizes. The period is a multiple of no chunk size: a chunk in a wrong place is seen.
 */
#ifndef CONTENT_H
#define CONTENT_H
#include "wire.h"

#define HEADER_BYTES (64L << 10)
#define PERIOD_BYTES ((257L << 20) + 4096)

struct object {
    char *name;
    long size;
    char *header;
};

/* From "name:size"; exits if that is no object. */
struct object content_object(const char *text);
void content_make(void);
/* Bytes [start, start + size) of the object: 0, or -1. */
int content_send(struct wire *wire, const struct object *object, long start, long size);
#endif
