/* One client's connection, plain or TLS. */
#ifndef WIRE_H
#define WIRE_H
#include <stddef.h>
#include <sys/types.h>

struct wire {
    int fd;
    void *tls; /* SSL, or NULL */
};

/* Certificate and key (PEM, one file or two). Exits if they cannot be used. */
void wire_use_tls(const char *certificate, const char *key);
/* 0, or -1 if the handshake failed. Takes the descriptor. */
int wire_open(struct wire *wire, int fd);
ssize_t wire_receive(struct wire *wire, void *buffer, size_t size);
/* All of it: 0, or -1. `more`: further bytes follow at once. */
int wire_send(struct wire *wire, const char *data, size_t size, int more);
/* The same from a file that is mapped as well. */
int wire_send_file(struct wire *wire, int file, const char *map, long start, long size);
/* Waits, for ever if need be, until the client closes. */
void wire_wait_for_close(struct wire *wire);
void wire_close(struct wire *wire);
#endif
