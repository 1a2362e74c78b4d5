/*
 * Plays a trace to block devices inside the guest, and reports how many reads each cache served.
 *
 * Usage: player TRACE NAME:DEVICE:STAT...
 *
 * Each request goes to all devices, one after the other, with direct I/O. The next request starts
 * at its time in the trace, or when all devices have completed this one, whichever is later. A read
 * is a hit if it needed no data from the backing device. STAT selects one of two ways to detect
 * hits:
 *
 * - STAT is the `stat` file of the backing device. A read is a hit if the file counts no new read.
 *   This is correct for caches that read the backing device only for a request.
 * - STAT is "-": the backing device writes MARK over the first byte of all data that it returns, and
 *   all other data is zero. A read is a hit if no block of it begins with MARK. This is needed for
 *   dm-cache, which copies blocks in the background.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096ull
/* Longer requests are sent in parts of this size. */
#define PART_MAX (16ull << 20)
#define MARK 0xff
#define DEVICES_MAX 64

/* A request in the trace file, little-endian. */
struct request {
	uint32_t gap_us;	/* time since the previous request */
	uint32_t block;		/* first block */
	uint32_t blocks_op;	/* twice the number of blocks, plus 1 for a write */
};

struct device {
	const char *name;
	int fd, stat;		/* stat is -1 for a device with marks */
	uint64_t reads, hits, errors;
};

static unsigned char *read_buffer, *write_buffer;

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* Returns the number of reads that a stat file counts. */
static uint64_t count_reads(int fd)
{
	char text[256];
	ssize_t length = pread(fd, text, sizeof text - 1, 0);

	if (length <= 0)
		return 0;
	text[length] = 0;
	return strtoull(text, NULL, 10);
}

/* Sends one part of a request. Returns the number of marks found, or -1 for an error. */
static long send_part(struct device *device, int is_write, uint64_t offset, uint64_t bytes)
{
	long marks = 0;
	ssize_t done = is_write ? pwrite(device->fd, write_buffer, bytes, offset)
				: pread(device->fd, read_buffer, bytes, offset);

	if (done != (ssize_t)bytes) {
		if (device->errors++ == 0)
			printf("trouble %s: I/O error at byte %llu: %s\n", device->name,
			       (unsigned long long)offset, done < 0 ? strerror(errno) : "too short");
		return -1;
	}
	for (uint64_t at = 0; !is_write && at < bytes; at += BLOCK)
		marks += read_buffer[at] == MARK;
	return marks;
}

static void send_request(struct device *device, const struct request *request)
{
	int is_write = request->blocks_op & 1, failed = 0;
	uint64_t offset = request->block * BLOCK, end = offset + (request->blocks_op >> 1) * BLOCK;
	int is_counted = !is_write && device->stat >= 0;
	uint64_t before = is_counted ? count_reads(device->stat) : 0, missed = 0;

	while (offset < end) {
		uint64_t bytes = end - offset < PART_MAX ? end - offset : PART_MAX;
		long marks = send_part(device, is_write, offset, bytes);

		failed |= marks < 0;
		missed += marks > 0;
		offset += bytes;
	}
	if (is_write)
		return;
	if (is_counted)
		missed = count_reads(device->stat) - before;
	device->reads++;
	device->hits += !failed && missed == 0;
}

static int open_device(struct device *device, char *argument)
{
	char *path, *stat;

	device->name = strtok(argument, ":");
	path = strtok(NULL, ":");
	stat = strtok(NULL, ":");
	if (!stat)
		return -1;
	device->fd = open(path, O_RDWR | O_DIRECT);
	device->stat = strcmp(stat, "-") ? open(stat, O_RDONLY) : -1;
	if (device->fd < 0 || (device->stat < 0 && strcmp(stat, "-"))) {
		printf("trouble %s: cannot open %s: %s\n", device->name, path, strerror(errno));
		return -1;
	}
	return 0;
}

int main(int argc, char **argv)
{
	static struct device devices[DEVICES_MAX];
	static struct request batch[4096];
	int count = argc - 2;
	FILE *trace = argc > 2 ? fopen(argv[1], "r") : NULL;
	uint64_t start_ns, latest_ns = 0;
	size_t got;

	if (!trace || count > DEVICES_MAX) {
		printf("trouble player: no trace, or more than %d devices\n", DEVICES_MAX);
		return 1;
	}
	read_buffer = aligned_alloc(BLOCK, PART_MAX);
	write_buffer = aligned_alloc(BLOCK, PART_MAX);
	if (!read_buffer || !write_buffer)
		return 1;
	memset(write_buffer, 0, PART_MAX);
	for (int i = 0; i < count; i++)
		if (open_device(&devices[i], argv[2 + i]))
			return 1;
	start_ns = now_ns();
	while ((got = fread(batch, sizeof *batch, 4096, trace)) > 0) {
		for (size_t n = 0; n < got; n++) {
			uint64_t now = now_ns();

			start_ns += batch[n].gap_us * 1000ull;
			if (now < start_ns) {
				struct timespec until = { start_ns / 1000000000, start_ns % 1000000000 };

				clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
			} else if (now - start_ns > latest_ns) {
				latest_ns = now - start_ns;
			}
			for (int i = 0; i < count; i++)
				send_request(&devices[i], &batch[n]);
		}
	}
	for (int i = 0; i < count; i++)
		printf("played %s reads=%llu hits=%llu errors=%llu late_ms=%llu\n", devices[i].name,
		       (unsigned long long)devices[i].reads, (unsigned long long)devices[i].hits,
		       (unsigned long long)devices[i].errors, (unsigned long long)(latest_ns / 1000000));
	return 0;
}
