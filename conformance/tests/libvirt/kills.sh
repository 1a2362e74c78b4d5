#!/bin/sh
# Kills hob's commands and hob's daemon after every step of attaching and detaching the disk of a domain, as
# root in mount and PID namespaces of its own. The arguments are the directory of the test, with hob.toml and
# domain.xml, and the number of rounds. kills.rs runs this script, and ends the guest's load between the files
# rounds-done and load-ended.
set -eux
. "$(dirname "$0")/host.sh"
rounds=$2

# Number of steps of each plan.
STEPS=12

hob_command() {
    case $1 in
    attach) echo "hob attach libvirt:web --records records --nbd nbd.sock --size 64M --preset auto" ;;
    detach) echo "hob detach libvirt:web --records records" ;;
    esac
}

# Starts a command that stops itself after so many steps, and waits until it has stopped or ended.
begin() {
    # shellcheck disable=SC2046
    env "HOB_ATTACH_STOP_AFTER=$1" $(hob_command "$2") >command.log 2>&1 &
    command=$!
    await has_paused
}

# Prints the state of the command's process: Z after its end. The process has no file in /proc if
# the shell has already waited for it.
state_of_command() { sed 's/.*) \(.\).*/\1/' "/proc/$command/stat" 2>/dev/null || echo Z; }
is_stopped() { [ "$(state_of_command)" = T ]; }
has_paused() { is_stopped || [ "$(state_of_command)" = Z ]; }

run() {
    # shellcheck disable=SC2046
    $(hob_command "$1") >command.log 2>&1 || fail
}

finish() { wait "$command" || fail; }

fail() {
    cat command.log
    tail -n 5 hob.log libvirtd.log
    exit 1
}

kill_command() {
    # The last line is the step before the stop.
    if tail -n 1 command.log | grep 'pause the VM'; then await is_listed 'paused by hob'; fi
    kill -9 "$command"
    wait "$command" || true
}

# The record is deleted last.
is_recorded() { [ -e records/web-virtio-disk0.json ]; }

# Kills the attachment after each step. The next command continues, or removes what the killed command
# left and begins again. In both cases it attaches the disk.
attach_after_each_kill() {
    for step in $(seq "$STEPS"); do
        begin "$step" attach
        is_stopped || fail
        kill_command
        run attach
        if [ "$step" -lt "$STEPS" ]; then run detach; fi
    done
}

# Kills each command after one step. The next command continues.
continue_after_each_kill() {
    step=0
    begin 1 "$1"
    while is_stopped; do
        step=$((step + 1))
        [ "$step" -le "$STEPS" ] || fail
        kill_command
        is_recorded || break
        begin 1 "$1"
    done
    if is_recorded; then finish; fi
    [ "$step" = "$STEPS" ] || fail
}

# Kills the command after each step. The command $2 undoes the steps, and the last $1 succeeds.
undo_after_each_kill() {
    for step in $(seq "$STEPS"); do
        begin "$step" "$1"
        is_stopped || fail
        kill_command
        if [ "$2" = attach ] || is_recorded; then run "$2"; fi
    done
    run "$1"
}

# Kills the daemon after each step of one command. At every third step the command calls the daemon
# while the daemon is not running.
kill_daemon_after_each_step() {
    step=0
    begin each "$1"
    while is_stopped; do
        step=$((step + 1))
        kill -9 "$daemon"
        wait "$daemon" || true
        if [ $((step % 3)) = 1 ]; then
            kill -CONT "$command"
            sleep 0.5
            start_daemon
        else
            start_daemon
            kill -CONT "$command"
        fi
        await has_paused
    done
    finish
    [ "$step" -ge "$STEPS" ] || fail
}

# Prints the number of seconds in which requests of the guest completed.
busy_seconds() { grep -a 'GUEST-LOAD second=' console | grep -acv ' reads=0 writes=0 ' || true; }
is_busier() { [ "$(busy_seconds)" -gt $((before + 1)) ]; }
guest_continues() {
    before=$(busy_seconds)
    await is_busier
}

is_attached() {
    has_hobs_disk
    await is_listed 'uses hob'
    guest_continues
}

is_detached() {
    definition | cmp - before.xml
    guest_continues
}

virsh -q define domain.xml
definition >before.xml
virsh -q start web
await grep -a 'GUEST-LOAD second=1 ' console

for round in $(seq "$rounds"); do
    if [ $((round % 2)) = 1 ]; then
        attach_after_each_kill
        is_attached
        continue_after_each_kill detach
        is_detached
    else
        undo_after_each_kill attach detach
        is_attached
        undo_after_each_kill detach attach
        is_detached
    fi
    kill_daemon_after_each_step attach
    is_attached
    kill_daemon_after_each_step detach
    is_detached
done
if hob disk list | grep web-virtio-disk0; then exit 1; fi

touch rounds-done
await test -e load-ended
virsh -q destroy web
