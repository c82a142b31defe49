/* A wire between two interfaces that takes its time and loses packets: what the kernel's own emulator (netem) would do.
 *
 *     bridge INTERFACE INTERFACE DELAY_MICROS LOSS SEED
 *
 * Every packet that comes in at one interface leaves at the other after the delay, unless chance loses it. Packets keep
 * their segmentation offload (PACKET_VNET_HDR), so one read moves up to 64 KiB; chance decides over each segment of it
 * as over a packet on the wire, and what is left on either side of a lost one travels on. Ends when standard input does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <linux/virtio_net.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define RING_BYTES (256 << 20)
#define PACKET_BYTES (68 << 10)
#define SOCKET_BYTES (64 << 20)
#define BATCH 64

struct packet {
    long long due_nanos;
    unsigned size;
};

/* Packets on their way in one direction, oldest first; pages of the ring cost nothing before they are used. */
struct direction {
    int in, out;
    char *ring;
    size_t head, tail, used;
};

static long long now_nanos(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int require(int result, const char *what) {
    if (result < 0) {
        perror(what);
        exit(1);
    }
    return result;
}

static int open_interface(const char *name) {
    int one = 1, size = SOCKET_BYTES;
    int fd = require(socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0), "packet socket");
    require(setsockopt(fd, SOL_PACKET, PACKET_VNET_HDR, &one, sizeof one), "PACKET_VNET_HDR");
    require(setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one), "PACKET_IGNORE_OUTGOING");
    /* Inside a user namespace these two may be refused: the smaller buffers suit links that are shaped. */
    if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size))
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size))
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    struct sockaddr_ll address = {
        .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = if_nametoindex(name)};
    require(bind(fd, (struct sockaddr *)&address, sizeof address), name);
    return fd;
}

/* Room for one more packet of any size in one piece, or NULL: the ring is full. */
static struct packet *room(struct direction *d) {
    const size_t need = sizeof(struct packet) + PACKET_BYTES;
    if (d->used == 0)
        d->head = d->tail = 0;
    if (d->tail >= d->head && d->used < RING_BYTES) {
        if (d->tail + need <= RING_BYTES)
            return (struct packet *)(d->ring + d->tail);
        if (need >= d->head)
            return NULL;
        if (d->tail + sizeof(struct packet) <= RING_BYTES) /* what follows starts over */
            ((struct packet *)(d->ring + d->tail))->size = 0;
        d->tail = 0;
    }
    return d->head - d->tail > need ? (struct packet *)(d->ring + d->tail) : NULL;
}

static struct packet *oldest(struct direction *d) {
    if (d->used == 0)
        return NULL;
    struct packet *p = (struct packet *)(d->ring + d->head);
    if (d->head + sizeof *p > RING_BYTES || p->size == 0) {
        d->head = 0;
        p = (struct packet *)d->ring;
    }
    return p;
}

static size_t length(const struct packet *p) {
    return (sizeof *p + p->size + 15) & ~(size_t)15;
}

static void enter(struct direction *d, struct packet *p, size_t size, long long due_nanos) {
    p->size = (unsigned)size;
    p->due_nanos = due_nanos;
    d->tail += length(p);
    d->used += length(p);
}

/* The headers of a read: what virtio says of it, Ethernet, IPv4, TCP. */
struct headers {
    struct virtio_net_hdr offload;
    struct ether_header ethernet;
    struct iphdr ip;
} __attribute__((packed));

static unsigned sum16(const void *from, size_t words) {
    const unsigned char *bytes = from;
    unsigned sum = 0;
    for (size_t i = 0; i < words; i++)
        sum += bytes[2 * i] << 8 | bytes[2 * i + 1];
    return sum;
}

static unsigned short folded(unsigned sum) {
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return htons((unsigned short)sum);
}

/* Headers of a read of TCP segments in one piece, with their size; 0 for any other packet. */
static size_t segmented(const char *data, size_t size) {
    const struct headers *h = (const struct headers *)data;
    int kind = h->offload.gso_type & ~VIRTIO_NET_HDR_GSO_ECN;
    if (size < sizeof *h + sizeof(struct tcphdr) || kind != VIRTIO_NET_HDR_GSO_TCPV4)
        return 0;
    size_t tcp_at = sizeof *h - sizeof h->ip + h->ip.ihl * 4;
    return tcp_at + ((const struct tcphdr *)(data + tcp_at))->doff * 4;
}

/* Segments `first` up to `end` of a read, as a packet of their own. */
static void cut_out(struct direction *d, const char *data, size_t size, size_t first, size_t end, long long due_nanos) {
    size_t head = segmented(data, size), each = ((const struct headers *)data)->offload.gso_size;
    size_t from = head + first * each, until = head + end * each < size ? head + end * each : size;
    struct packet *p = room(d);
    if (!p || from >= until)
        return;
    char *made = (char *)(p + 1);
    memcpy(made, data, head);
    memcpy(made + head, data + from, until - from);
    struct headers *h = (struct headers *)made;
    size_t tcp_at = sizeof *h - sizeof h->ip + h->ip.ihl * 4, tcp_size = head - tcp_at + until - from;
    struct tcphdr *tcp = (struct tcphdr *)(made + tcp_at);
    if (until - from <= each)
        h->offload.gso_type = VIRTIO_NET_HDR_GSO_NONE, h->offload.gso_size = 0;
    h->ip.tot_len = htons((unsigned short)(h->ip.ihl * 4 + tcp_size));
    h->ip.id = htons((unsigned short)(ntohs(h->ip.id) + first));
    h->ip.check = 0;
    h->ip.check = ~folded(sum16(&h->ip, h->ip.ihl * 2));
    tcp->seq = htonl(ntohl(tcp->seq) + (unsigned)(first * each));
    if (until < size)
        tcp->fin = tcp->psh = 0;
    tcp->check = folded(sum16(&h->ip.saddr, 4) + IPPROTO_TCP + (unsigned)tcp_size); /* the kernel adds the rest */
    enter(d, p, head + until - from, due_nanos);
}

/* Let chance decide over a packet, or over each segment of one. */
static void try_luck(struct direction *d, const char *data, size_t size, double loss, long long due_nanos) {
    size_t head = segmented(data, size), each = head ? ((const struct headers *)data)->offload.gso_size : size;
    size_t count = (size - head + each - 1) / each, first = 0;
    for (size_t i = 0; i < count; i++) {
        if (drand48() >= loss)
            continue;
        if (head)
            cut_out(d, data, size, first, i, due_nanos);
        first = i + 1;
    }
    struct packet *p = room(d);
    if (first == 0 && p) {
        memcpy(p + 1, data, size);
        enter(d, p, size, due_nanos);
    } else if (head)
        cut_out(d, data, size, first, count, due_nanos);
}

static void take(struct direction *d, long long delay_nanos, double loss) {
    static char read[PACKET_BYTES];
    for (int n = 0; n < BATCH; n++) {
        struct packet *p = room(d);
        if (!p)
            return;
        ssize_t size = recv(d->in, loss > 0 ? read : (char *)(p + 1), PACKET_BYTES, 0);
        if (size <= 0)
            return;
        long long due_nanos = now_nanos() + delay_nanos;
        if (loss > 0)
            try_luck(d, read, (size_t)size, loss, due_nanos);
        else
            enter(d, p, (size_t)size, due_nanos);
    }
}

/* Send what is due; return when the next packet is, or -1. A queue that is full behind the interface loses packets. */
static long long give(struct direction *d) {
    struct packet *p;
    while ((p = oldest(d))) {
        if (p->due_nanos > now_nanos())
            return p->due_nanos;
        if (send(d->out, p + 1, p->size, 0) < 0 && errno == EINTR)
            continue;
        d->head += length(p);
        d->used -= length(p);
    }
    return -1;
}

int main(int count, char **given) {
    if (count != 6) {
        fprintf(stderr, "usage: bridge INTERFACE INTERFACE DELAY_MICROS LOSS SEED\n");
        return 2;
    }
    int fds[2] = {open_interface(given[1]), open_interface(given[2])};
    long long delay_nanos = atoll(given[3]) * 1000;
    double loss = atof(given[4]);
    srand48(atol(given[5]));
    struct direction ways[2];
    for (int i = 0; i < 2; i++) {
        char *ring = mmap(NULL, RING_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (ring == MAP_FAILED)
            require(-1, "memory");
        ways[i] = (struct direction){.in = fds[i], .out = fds[1 - i], .ring = ring};
    }
    puts("ready");
    fflush(stdout);
    for (;;) {
        long long next = -1;
        for (int i = 0; i < 2; i++) {
            take(&ways[i], delay_nanos, loss);
            long long due = give(&ways[i]);
            if (due >= 0 && (next < 0 || due < next))
                next = due;
        }
        struct pollfd waits[3] = {{fds[0], POLLIN, 0}, {fds[1], POLLIN, 0}, {0, POLLIN, 0}};
        long long left = next < 0 ? 1000000000LL : next - now_nanos();
        struct timespec timeout = {left > 0 ? left / 1000000000LL : 0, left > 0 ? left % 1000000000LL : 0};
        require(ppoll(waits, 3, &timeout, NULL), "poll");
        char rest[64];
        if (waits[2].revents && read(0, rest, sizeof rest) <= 0)
            return 0;
    }
}
