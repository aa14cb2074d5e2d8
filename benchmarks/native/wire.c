#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

static int send_plain(int fd, const char *data, size_t size, int more) {
    while (size > 0) {
        ssize_t sent = send(fd, data, size, MSG_NOSIGNAL | (more ? MSG_MORE : 0));
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return -1;
        data += sent;
        size -= sent;
    }
    return 0;
}

#ifdef WITH_TLS
#include <openssl/err.h>
#include <openssl/ssl.h>

/* Records are made in memory and leave many to a send, as from a store with a large buffer. */
enum { BATCH_BYTES = 256 << 10 };
static SSL_CTX *context;

void wire_use_tls(const char *certificate, const char *key) {
    context = SSL_CTX_new(TLS_server_method());
    /* What S3 and a client with AES in hardware agree on. */
    if (!context || !SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION) ||
        !SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") ||
        SSL_CTX_use_certificate_chain_file(context, certificate) != 1 ||
        SSL_CTX_use_PrivateKey_file(context, key, SSL_FILETYPE_PEM) != 1) {
        ERR_print_errors_fp(stderr);
        exit(1);
    }
}

static int flush(SSL *tls, int fd, int more) {
    BIO *records = SSL_get_wbio(tls);
    char *data;
    long size = BIO_get_mem_data(records, &data);
    int failed = size > 0 && send_plain(fd, data, size, more);
    (void)BIO_reset(records);
    return failed ? -1 : 0;
}

int wire_open(struct wire *wire, int fd) {
    *wire = (struct wire){.fd = fd};
    if (!context) return 0;
    SSL *tls = SSL_new(context);
    SSL_set_fd(tls, fd);
    wire->tls = tls;
    if (SSL_accept(tls) != 1) return -1;
    SSL_set0_wbio(tls, BIO_new(BIO_s_mem()));
    return 0;
}

ssize_t wire_receive(struct wire *wire, void *buffer, size_t size) {
    return wire->tls ? SSL_read(wire->tls, buffer, size) : recv(wire->fd, buffer, size, 0);
}

int wire_send(struct wire *wire, const char *data, size_t size, int more) {
    if (!wire->tls) return send_plain(wire->fd, data, size, more);
    while (size > 0) {
        int part = size > BATCH_BYTES ? BATCH_BYTES : size;
        if (SSL_write(wire->tls, data, part) != part) return -1;
        if (flush(wire->tls, wire->fd, more)) return -1;
        data += part;
        size -= part;
    }
    return 0;
}

void wire_close(struct wire *wire) {
    if (wire->tls) SSL_free(wire->tls);
    ERR_clear_error();
    close(wire->fd);
}
#else
void wire_use_tls(const char *certificate, const char *key) {
    (void)certificate, (void)key;
    fprintf(stderr, "built without TLS\n");
    exit(1);
}

int wire_open(struct wire *wire, int fd) {
    *wire = (struct wire){.fd = fd};
    return 0;
}

ssize_t wire_receive(struct wire *wire, void *buffer, size_t size) {
    return recv(wire->fd, buffer, size, 0);
}

int wire_send(struct wire *wire, const char *data, size_t size, int more) {
    return send_plain(wire->fd, data, size, more);
}

void wire_close(struct wire *wire) { close(wire->fd); }
#endif

int wire_send_file(struct wire *wire, int file, const char *map, long start, long size) {
    if (wire->tls) return wire_send(wire, map + start, size, 0);
    off_t position = start;
    while (size > 0) {
        ssize_t sent = sendfile(wire->fd, file, &position, size);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return -1;
        size -= sent;
    }
    return 0;
}

void wire_wait_for_close(struct wire *wire) {
    struct pollfd waited = {.fd = wire->fd, .events = POLLRDHUP};
    while (poll(&waited, 1, -1) < 0 && errno == EINTR) {
    }
}
