/* A switch whose links have faults: carries frames between network interfaces, from each to each by a rule of its own.

   `switch INTERFACE...` says `ready`. A line `FROM TO DROPS DELAY JITTER LOSS DOUBLES` on stdin is the rule of one way between
   two interfaces, which are counted from 0: whether all frames are dropped, the milliseconds by which each is late, those that
   are added at random, which lets later frames overtake, and how many of 100 are lost, and come twice. It says
   `done` to each line, and ends with stdin. */

#include <err.h>
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <arpa/inet.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 16, OFFLOAD_HEADER = 10, LONGEST = 1 << 17, RECEIVE_BUFFER = 8 << 20 };

struct rule { int drops; double delay, jitter, loss, doubles; };

struct frame {
    struct frame *next;
    double due;
    int to;
    ssize_t length;
    unsigned char bytes[];
};

static int ports, sockets[MOST];
static unsigned char hosts[MOST][ETH_ALEN]; /* the hardware address that was last seen behind each interface */
static struct rule rules[MOST][MOST];
static struct frame *under_way; /* the one that is due first comes first */

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static bool happens(double percent)
{
    return drand48() * 100 < percent;
}

/* Take all frames that come in at an interface, and only those. */
static int plug(const char *interface)
{
    int one = 1, size = RECEIVE_BUFFER, plugged = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL)};
    struct packet_mreq all = {.mr_type = PACKET_MR_PROMISC};

    all.mr_ifindex = address.sll_ifindex = if_nametoindex(interface);
    if (plugged < 0 || address.sll_ifindex == 0
        /* the kernel hands over frames longer than the wire's and without checksums: they go on as they have come */
        || setsockopt(plugged, SOL_PACKET, PACKET_VNET_HDR, &one, sizeof one)
        || setsockopt(plugged, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one)
        || setsockopt(plugged, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size)
        || bind(plugged, (struct sockaddr *)&address, sizeof address)
        || setsockopt(plugged, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all))
        err(1, "%s", interface);
    return plugged;
}

static void deliver(int to, const unsigned char *bytes, ssize_t length)
{
    /* an interface that is down, or full, loses the frame, as on any link */
    if (write(sockets[to], bytes, length) < 0 && errno != ENETDOWN && errno != ENOBUFS && errno != EAGAIN)
        warn("a frame of %zd bytes to interface %d", length, to);
}

static void deliver_later(double due, int to, const unsigned char *bytes, ssize_t length)
{
    struct frame **place = &under_way, *frame = malloc(sizeof *frame + length);

    if (!frame)
        err(1, "a frame");
    while (*place && (*place)->due <= due)
        place = &(*place)->next;
    *frame = (struct frame){.next = *place, .due = due, .to = to, .length = length};
    memcpy(frame->bytes, bytes, length);
    *place = frame;
}

static void carry(int from, int to, const unsigned char *bytes, ssize_t length)
{
    const struct rule *rule = &rules[from][to];

    if (rule->drops || happens(rule->loss))
        return;
    for (int copies = happens(rule->doubles) ? 2 : 1; copies; copies--) {
        double late = (rule->delay + rule->jitter * drand48()) / 1000;
        if (late > 0)
            deliver_later(now() + late, to, bytes, length);
        else
            deliver(to, bytes, length);
    }
}

static void take(int from)
{
    static unsigned char bytes[LONGEST];
    const unsigned char *destination = bytes + OFFLOAD_HEADER, *source = destination + ETH_ALEN;
    ssize_t length;

    while ((length = read(sockets[from], bytes, sizeof bytes)) >= OFFLOAD_HEADER + ETH_HLEN) {
        int only = -1;
        memcpy(hosts[from], source, ETH_ALEN);
        for (int port = 0; port < ports; port++)
            if (!memcmp(hosts[port], destination, ETH_ALEN))
                only = port;
        for (int to = 0; to < ports; to++)
            if (to != from && (only < 0 || to == only))
                carry(from, to, bytes, length);
    }
}

static void deliver_due(void)
{
    while (under_way && under_way->due <= now()) {
        struct frame *frame = under_way;
        under_way = frame->next;
        deliver(frame->to, frame->bytes, frame->length);
        free(frame);
    }
}

/* Take one line, which comes whole: it is written at once, and the next one after the answer. */
static void obey(void)
{
    char line[256];
    int from, to;
    struct rule rule;
    ssize_t length = read(STDIN_FILENO, line, sizeof line - 1);

    if (length <= 0)
        exit(0);
    line[length] = 0;
    if (sscanf(line, "%d %d %d %lf %lf %lf %lf", &from, &to, &rule.drops, &rule.delay, &rule.jitter, &rule.loss,
               &rule.doubles) != 7 || from < 0 || from >= ports || to < 0 || to >= ports)
        errx(2, "no rule: %s", line);
    rules[from][to] = rule;
    puts("done");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    struct pollfd watched[MOST + 1] = {{.fd = STDIN_FILENO, .events = POLLIN}};

    ports = argc - 1;
    if (ports > MOST)
        errx(2, "at most %d interfaces", MOST);
    srand48(time(NULL));
    for (int port = 0; port < ports; port++) {
        sockets[port] = plug(argv[port + 1]);
        watched[port + 1] = (struct pollfd){.fd = sockets[port], .events = POLLIN};
    }
    puts("ready");
    fflush(stdout);
    for (;;) {
        double patience = under_way ? (under_way->due - now()) * 1000 : -1;
        if (poll(watched, ports + 1, under_way ? (patience > 0 ? (int)patience + 1 : 0) : -1) < 0 && errno != EINTR)
            err(1, "poll");
        if (watched[0].revents)
            obey();
        for (int port = 0; port < ports; port++)
            if (watched[port + 1].revents)
                take(port);
        deliver_due();
    }
}
