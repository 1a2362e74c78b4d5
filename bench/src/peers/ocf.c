/*
 * Plays a trace through the Open CAS Framework (OCF), and prints the results as one line of JSON.
 *
 * Usage: ocf CACHE_BYTES always|nhit < REQUESTS. Each line of the requests is "R OFFSET LENGTH" or
 * "W OFFSET LENGTH", in bytes. One request is in flight at a time. The cache writes through, and
 * has lines of 4 KiB and the sequential cut-off and promotion thresholds of Open CAS. After the
 * start of the cache, its device and its disk do not keep data: they only count requests.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <ocf/ocf.h>

#define LINE_BYTES 4096
#define SIZE_TRIES 12
/* The default of Open CAS Linux; OCF's own default is 1024 bytes. */
#define SEQUENTIAL_BYTES (1 << 20)
/* OCF does not start on smaller devices. */
#define DEVICE_BYTES_MIN (40ULL << 20)

enum { TYPE = 1 };

struct device {
	uint64_t length;
	/* The contents during the start of the cache, which reads its metadata; NULL for the disk. */
	uint8_t *memory;
	uint64_t read_bytes, written_bytes, reads;
};

static struct device flash, disk;
/* End of the metadata on flash, bytes. Writes before it are not counted. */
static uint64_t metadata_bytes;
static bool counts;

struct buffer {
	uint8_t *bytes;
	uint32_t at;
};

static void fail(const char *what, int error)
{
	fprintf(stderr, "ocf: cannot %s: error %d\n", what, error);
	exit(1);
}

static struct device *device_of(ocf_volume_t volume)
{
	return *(struct device **)ocf_volume_get_priv(volume);
}

static int open_volume(ocf_volume_t volume, void *params)
{
	const char *name = ocf_uuid_to_str(ocf_volume_get_uuid(volume));
	*(struct device **)ocf_volume_get_priv(volume) = strcmp(name, "flash") ? &disk : &flash;
	return 0;
}

static void close_volume(ocf_volume_t volume)
{
}

static void transfer(ocf_volume_t volume, ocf_forward_token_t token, int direction, uint64_t address,
		     uint64_t bytes, uint64_t offset)
{
	struct device *device = device_of(volume);
	bool is_write = direction == OCF_WRITE;
	if (counts && is_write && !(device == &flash && address < metadata_bytes))
		device->written_bytes += bytes;
	if (counts && !is_write) {
		device->read_bytes += bytes;
		device->reads++;
	}
	if (!counts && device->memory) {
		struct buffer *buffer = ocf_forward_get_data(token);
		if (is_write)
			memcpy(device->memory + address, buffer->bytes + offset, bytes);
		else
			memcpy(buffer->bytes + offset, device->memory + address, bytes);
	}
	ocf_forward_end(token, 0);
}

static void flush_volume(ocf_volume_t volume, ocf_forward_token_t token)
{
	ocf_forward_end(token, 0);
}

static void discard(ocf_volume_t volume, ocf_forward_token_t token, uint64_t address, uint64_t bytes)
{
	ocf_forward_end(token, 0);
}

static unsigned largest_io(ocf_volume_t volume)
{
	return 1 << 20;
}

static uint64_t length_of(ocf_volume_t volume)
{
	return device_of(volume)->length;
}

static const struct ocf_volume_properties volumes = {
	.name = "counting device",
	.volume_priv_size = sizeof(struct device *),
	.ops = {
		.open = open_volume,
		.close = close_volume,
		.forward_io = transfer,
		.forward_flush = flush_volume,
		.forward_discard = discard,
		.get_max_io_size = largest_io,
		.get_length = length_of,
	},
};

static ctx_data_t *new_data(uint32_t pages)
{
	struct buffer *buffer = calloc(1, sizeof(*buffer));
	buffer->bytes = calloc(pages, 4096);
	return buffer;
}

static void free_data(ctx_data_t *data)
{
	struct buffer *buffer = data;
	if (buffer)
		free(buffer->bytes);
	free(buffer);
}

static int lock_data(ctx_data_t *data)
{
	return 0;
}

static void unlock_data(ctx_data_t *data)
{
}

static uint32_t read_data(void *to, ctx_data_t *from, uint32_t bytes)
{
	struct buffer *buffer = from;
	memcpy(to, buffer->bytes + buffer->at, bytes);
	buffer->at += bytes;
	return bytes;
}

static uint32_t write_data(ctx_data_t *to, const void *from, uint32_t bytes)
{
	struct buffer *buffer = to;
	memcpy(buffer->bytes + buffer->at, from, bytes);
	buffer->at += bytes;
	return bytes;
}

static uint32_t zero_data(ctx_data_t *data, uint32_t bytes)
{
	struct buffer *buffer = data;
	memset(buffer->bytes + buffer->at, 0, bytes);
	buffer->at += bytes;
	return bytes;
}

static uint32_t seek_data(ctx_data_t *data, ctx_data_seek_t from, uint32_t offset)
{
	struct buffer *buffer = data;
	buffer->at = from == ctx_data_seek_begin ? offset : buffer->at + offset;
	return offset;
}

static uint64_t copy_data(ctx_data_t *to, ctx_data_t *from, uint64_t at, uint64_t of, uint64_t bytes)
{
	if (!counts)
		memcpy(((struct buffer *)to)->bytes + at, ((struct buffer *)from)->bytes + of, bytes);
	return bytes;
}

static void erase_data(ctx_data_t *data)
{
}

static int start_cleaner(ocf_cleaner_t cleaner)
{
	return 0;
}

static void use_cleaner(ocf_cleaner_t cleaner)
{
}

static int log_line(ocf_logger_t logger, ocf_logger_lvl_t level, const char *format, va_list values)
{
	return level > log_warn ? 0 : vfprintf(stderr, format, values);
}

static const struct ocf_ctx_config context_config = {
	.name = "bench",
	.ops = {
		.data = {
			.alloc = new_data,
			.free = free_data,
			.mlock = lock_data,
			.munlock = unlock_data,
			.read = read_data,
			.write = write_data,
			.zero = zero_data,
			.seek = seek_data,
			.copy = copy_data,
			.secure_erase = erase_data,
		},
		.cleaner = { .init = start_cleaner, .kick = use_cleaner, .stop = use_cleaner },
		.logger = { .print = log_line },
	},
};

/* The only thread runs the queues when it waits, and when a queue gets work. */
static void leave_queue(ocf_queue_t queue)
{
}

static void run_queue(ocf_queue_t queue)
{
	ocf_queue_run(queue);
}

static const struct ocf_queue_ops queue_ops = {
	.kick = leave_queue,
	.kick_sync = run_queue,
	.stop = leave_queue,
};

static ocf_queue_t management, requests;
static bool ended;
static int result;
static ocf_core_t core;

static void cache_ended(ocf_cache_t cache, void *context, int error)
{
	result = error;
	ended = true;
}

static void core_ended(ocf_cache_t cache, ocf_core_t added, void *context, int error)
{
	core = added;
	cache_ended(cache, context, error);
}

static void request_ended(ocf_io_t io, void *first, void *second, int error)
{
	result = error;
	ended = true;
	ocf_io_put(io);
}

static void wait_for(const char *what)
{
	while (!ended) {
		ocf_queue_run(management);
		ocf_queue_run(requests);
	}
	ended = false;
	if (result)
		fail(what, result);
}

static ocf_cache_t start_cache(ocf_ctx_t context, bool is_nhit)
{
	struct ocf_mngt_cache_config config = { .name = "cache" };
	struct ocf_mngt_cache_attach_config attach = { 0 };
	struct ocf_volume_uuid uuid;
	ocf_cache_t cache;
	int error;

	ocf_mngt_cache_config_set_default(&config);
	config.cache_mode = ocf_cache_mode_wt;
	config.cache_line_size = LINE_BYTES;
	config.promotion_policy = is_nhit ? ocf_promotion_nhit : ocf_promotion_always;
	ocf_mngt_cache_attach_config_set_default(&attach);
	attach.force = true;
	attach.discard_on_start = false;
	attach.device.perform_test = false;
	ocf_uuid_set_str(&uuid, "flash");
	error = ocf_volume_create(&attach.device.volume, ocf_ctx_get_volume_type(context, TYPE), &uuid);
	error = error ? error : ocf_mngt_cache_start(context, &cache, &config, NULL);
	error = error ? error : ocf_queue_create_mngt(cache, &management, &queue_ops);
	error = error ? error : ocf_queue_create(cache, &requests, &queue_ops);
	if (error)
		fail("start the cache", error);
	flash.memory = realloc(flash.memory, flash.length);
	ocf_mngt_cache_attach(cache, &attach, cache_ended, NULL);
	wait_for("attach the cache's device");
	return cache;
}

/*
 * Starts a cache of `wanted_lines` lines. The metadata uses a part of the device, so several sizes
 * of the device are tried.
 */
static ocf_cache_t start_cache_of(ocf_ctx_t context, uint64_t wanted_lines, bool is_nhit,
				  struct ocf_cache_info *info)
{
	flash.length = wanted_lines * LINE_BYTES + wanted_lines * LINE_BYTES / 32 + (4 << 20);
	for (int try = 0;; try++) {
		if (flash.length < DEVICE_BYTES_MIN)
			flash.length = DEVICE_BYTES_MIN;
		ocf_cache_t cache = start_cache(context, is_nhit);
		ocf_cache_get_info(cache, info);
		bool is_least = info->size > wanted_lines && flash.length == DEVICE_BYTES_MIN;
		if (info->size == wanted_lines || is_least || try == SIZE_TRIES)
			return cache;
		ocf_mngt_cache_stop(cache, cache_ended, NULL);
		wait_for("stop the cache");
		ocf_queue_put(management);
		int64_t more = ((int64_t)wanted_lines - (int64_t)info->size) * LINE_BYTES;
		flash.length = more + (int64_t)flash.length > 0 ? flash.length + more : 0;
	}
}

static void add_disk(ocf_cache_t cache)
{
	struct ocf_mngt_core_config config = { 0 };
	ocf_mngt_core_config_set_default(&config);
	strcpy(config.name, "disk");
	config.volume_type = TYPE;
	config.seq_cutoff_threshold = SEQUENTIAL_BYTES;
	ocf_uuid_set_str(&config.uuid, "disk");
	ocf_mngt_cache_add_core(cache, &config, core_ended, NULL);
	wait_for("add the disk");
}

struct request {
	uint64_t offset, length;
	bool is_write;
};

static struct request *read_requests(size_t *count, uint64_t *longest)
{
	size_t room = 1 << 16;
	struct request *all = malloc(room * sizeof(*all));
	struct request next;
	char op;
	*count = 0;
	while (scanf(" %c %" SCNu64 " %" SCNu64, &op, &next.offset, &next.length) == 3) {
		if (*count == room)
			all = realloc(all, (room *= 2) * sizeof(*all));
		next.is_write = op == 'W';
		all[(*count)++] = next;
		if (next.length > *longest)
			*longest = next.length;
		if (next.offset + next.length > disk.length)
			disk.length = next.offset + next.length;
	}
	return all;
}

static double cpu_seconds(void)
{
	struct timespec time;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}

int main(int count_of_arguments, char **arguments)
{
	struct ocf_cache_info info;
	uint64_t longest = 4096, reads = 0, hits = 0;
	size_t count;
	ocf_ctx_t context;

	if (count_of_arguments != 3) {
		fprintf(stderr, "usage: ocf CACHE_BYTES always|nhit < REQUESTS\n");
		return 2;
	}
	struct request *all = read_requests(&count, &longest);
	disk.length = (disk.length | ((1 << 20) - 1)) + 1;
	if (ocf_ctx_create(&context, &context_config) ||
	    ocf_ctx_register_volume_type(context, TYPE, &volumes))
		fail("start OCF", errno);
	ocf_cache_t cache = start_cache_of(context, strtoull(arguments[1], NULL, 10) / LINE_BYTES,
					   !strcmp(arguments[2], "nhit"), &info);
	add_disk(cache);
	metadata_bytes = (uint64_t)info.metadata_end_offset * 4096;
	counts = true;
	disk.read_bytes = disk.written_bytes = flash.written_bytes = 0;

	ocf_volume_t volume = ocf_core_get_front_volume(core);
	struct buffer *data = new_data(longest / 4096 + 2);
	double began = cpu_seconds();
	for (size_t i = 0; i < count; i++) {
		const struct request *request = &all[i];
		uint64_t disk_reads = disk.reads;
		ocf_io_t io = ocf_volume_new_io(volume, requests, request->offset, request->length,
						request->is_write ? OCF_WRITE : OCF_READ, 0, 0);
		if (!io)
			fail("make a request", -ENOMEM);
		ocf_io_set_data(io, data, 0);
		ocf_io_set_cmpl(io, NULL, NULL, request_ended);
		ocf_core_submit_io(io);
		wait_for("execute a request");
		/* The cache may still store the data after the request has ended. */
		while (ocf_queue_pending_io(requests))
			ocf_queue_run(requests);
		reads += !request->is_write;
		hits += !request->is_write && disk.reads == disk_reads;
	}
	double seconds = cpu_seconds() - began;
	ocf_cache_get_info(cache, &info);
	printf("{\"cache_bytes\":%" PRIu64 ",\"reads\":%" PRIu64 ",\"read_hits\":%" PRIu64
	       ",\"flash_write_bytes\":%" PRIu64 ",\"memory_bytes\":%" PRIu64 ",\"ns_per_request\":%.1f}\n",
	       (uint64_t)info.size * LINE_BYTES, reads, hits, flash.written_bytes,
	       (uint64_t)info.metadata_footprint, count ? seconds * 1e9 / count : 0.0);
	fflush(stdout);
	/* The cache is not stopped, because it is not used again. */
	_exit(0);
}
