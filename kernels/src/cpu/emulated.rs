//! AMX's tiles for machines without them, for tests: an instruction that the CPU does not know ends in a signal, and the handler does what
//! the instruction would have done. Slow, but every kernel runs as it is, instruction by instruction.
//!
//! It knows those that [`super::strips`] uses: `ldtilecfg`, `tilerelease`, `tilezero`, `tileloadd`, `tilestored` and `tdpbssd`. All have a
//! VEX prefix of three bytes and no immediate. Others end the process as without this. Source of encodings and meaning: Intel 64 and IA-32
//! Architectures Software Developer's Manual, volume 2.

use std::cell::UnsafeCell;
use std::sync::Once;

use libc::{c_int, c_void, siginfo_t, ucontext_t};

/// Tiles, and the most bytes of one.
const TILES: usize = 8;
const ROWS: usize = 16;
const LINE: usize = 64;

/// A thread's tiles.
struct Tiles {
    rows: [usize; TILES],
    bytes: [usize; TILES],
    data: [[[u8; LINE]; ROWS]; TILES],
}

thread_local! {
    static MINE: UnsafeCell<Tiles> =
        const { UnsafeCell::new(Tiles { rows: [0; TILES], bytes: [0; TILES], data: [[[0; LINE]; ROWS]; TILES] }) };
}

/// Where a general register is in the context, by its number in an instruction.
const REGISTERS: [c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// An instruction, taken apart.
struct Instruction {
    /// What follows the VEX prefix, and the prefix that this one stands for: 0 none, 2 f3, 3 f2.
    opcode: u8,
    prefix: u8,
    /// Fields of ModRM, and the register of the prefix.
    register: usize,
    operand: usize,
    third: usize,
    /// Where the operand in memory is, if it is there, and what its index counts in bytes.
    memory: Option<(usize, usize)>,
    /// Bytes.
    length: usize,
}

/// Takes the instruction at `at` apart; `register` reads a general register. None: it is none of these.
///
/// # Safety
/// The instruction is readable.
unsafe fn decode(at: *const u8, register: impl Fn(usize) -> usize) -> Option<Instruction> {
    // SAFETY: the caller's promise.
    let byte = |i: usize| unsafe { *at.add(i) };
    // The bits that extend registers are inverted. The second opcode map, and vectors of 128 bits.
    if byte(0) != 0xc4 || byte(1) & 31 != 2 || byte(2) & 4 != 0 {
        return None;
    }
    let extended = |bit: u8| usize::from(byte(1) >> bit & 1 ^ 1) << 3;
    let (opcode, prefix, third) = (byte(3), byte(2) & 3, usize::from(byte(2) >> 3 & 15 ^ 15));
    let (mode, fields) = (byte(4) >> 6, byte(4));
    let (field, operand) = (usize::from(fields >> 3 & 7) | extended(7), usize::from(fields & 7) | extended(5));
    let mut instruction = Instruction { opcode, prefix, register: field, operand, third, memory: None, length: 5 };
    if mode == 3 {
        return Some(instruction);
    }
    let (mut base, mut index, mut length) = (operand, 0, 5);
    if fields & 7 == 4 {
        let (scale, number) = (byte(5) >> 6, usize::from(byte(5) >> 3 & 7) | extended(6));
        base = usize::from(byte(5) & 7) | extended(5);
        index = if number == 4 { 0 } else { register(number) << scale };
        length = 6;
    }
    let apart = match mode {
        // Without a base, or from the next instruction on: not what compilers make of a pointer.
        0 if base & 7 == 5 => return None,
        0 => 0,
        1 => i32::from(byte(length) as i8),
        _ => i32::from_le_bytes([byte(length), byte(length + 1), byte(length + 2), byte(length + 3)]),
    };
    instruction.length = length + [0, 1, 4][usize::from(mode)];
    instruction.memory = Some((register(base).wrapping_add_signed(apart as isize), index));
    Some(instruction)
}

impl Tiles {
    /// Does what an instruction says. False: it is none of these.
    ///
    /// # Safety
    /// What it reads and writes may be read and written.
    unsafe fn run(&mut self, instruction: &Instruction) -> bool {
        let &Instruction { register: tile, operand, third, .. } = instruction;
        match (instruction.opcode, instruction.prefix, instruction.memory) {
            (0x49, 0, Some((at, _))) => {
                let config = at as *const u8;
                for tile in 0..TILES {
                    // SAFETY: the caller's promise; a configuration has 64 bytes.
                    unsafe {
                        self.bytes[tile] = usize::from(config.add(16 + 2 * tile).cast::<u16>().read_unaligned());
                        self.rows[tile] = usize::from(*config.add(48 + tile));
                    }
                }
            }
            (0x49, 0, None) => (self.rows, self.bytes) = ([0; TILES], [0; TILES]),
            (0x49, 3, None) => self.data[tile] = [[0; LINE]; ROWS],
            (0x4b, 3, Some((at, apart))) => {
                self.data[tile] = [[0; LINE]; ROWS];
                for row in 0..self.rows[tile] {
                    let from = at.wrapping_add(row * apart) as *const u8;
                    // SAFETY: the caller's promise.
                    unsafe { from.copy_to(self.data[tile][row].as_mut_ptr(), self.bytes[tile]) }
                }
            }
            (0x4b, 2, Some((at, apart))) => {
                for row in 0..self.rows[tile] {
                    let to = at.wrapping_add(row * apart) as *mut u8;
                    // SAFETY: the caller's promise.
                    unsafe { self.data[tile][row].as_ptr().copy_to(to, self.bytes[tile]) }
                }
            }
            (0x5e, 3, None) => self.multiply(tile, operand, third),
            _ => return false,
        }
        true
    }

    /// Adds products of signed bytes, by fours, to 32-bit sums.
    fn multiply(&mut self, sums: usize, left: usize, right: usize) {
        for row in 0..self.rows[sums] {
            for column in 0..self.bytes[sums] / 4 {
                let at = 4 * column..4 * column + 4;
                let mut sum = i32::from_le_bytes(self.data[sums][row][at.clone()].try_into().unwrap_or_default());
                for k in 0..self.bytes[left] {
                    let [a, b] = [self.data[left][row][k], self.data[right][k / 4][4 * column + k % 4]];
                    sum = sum.wrapping_add(i32::from(a as i8) * i32::from(b as i8));
                }
                self.data[sums][row][at].copy_from_slice(&sum.to_le_bytes());
            }
        }
    }
}

/// Handles an unknown instruction. Touches nothing but its thread's tiles and what the instruction would.
unsafe extern "C" fn handle(_: c_int, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a context; its registers are those of the instruction, which is readable: it was about to run.
    unsafe {
        let registers = &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs;
        let at = registers[libc::REG_RIP as usize];
        let instruction = decode(at as *const u8, |number| registers[REGISTERS[number] as usize] as usize);
        let done = |instruction: &Instruction| MINE.with(|mine| (*mine.get()).run(instruction));
        match instruction.filter(done) {
            Some(instruction) => registers[libc::REG_RIP as usize] += instruction.length as i64,
            // It runs again, and ends the process.
            None => drop(libc::signal(libc::SIGILL, libc::SIG_DFL)),
        }
    }
}

/// Lets this process run tile instructions from now on.
pub fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: an action of zeros is a valid one; the handler has the signature that SA_SIGINFO asks for.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()), 0, "no handler of signals");
        }
    });
}
