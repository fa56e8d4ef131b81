//! The terminal as a whole screen, given back however the program ends, and what happens at it: keys, signals.

use std::io::{self, Write};
use std::panic;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use super::paint::{CLEAR, ENTER, LEAVE, paint};
use crate::terminal::{Key, Keyboard, Keys, Raw, size};

/// Keys that are read before they are taken.
const KEYS: usize = 64;

/// The screen. The terminal is as before when this is dropped, and when the program panics.
pub struct Screen {
    taken: Arc<Taken>,
    colours: bool,
    /// What the terminal shows.
    shown: Buffer,
}

/// The terminal's settings before, until it is given back.
struct Taken(Mutex<Option<Raw>>);

impl Taken {
    fn is_given_back(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    fn give_back(&self) {
        if let Some(raw) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // The terminal may be gone.
            let _ = send(LEAVE);
            drop(raw);
        }
    }
}

impl Screen {
    /// Takes the terminal. Standard input and output must be one.
    pub fn take(colours: bool) -> io::Result<Screen> {
        let taken = Arc::new(Taken(Mutex::new(Some(Raw::begin()?))));
        let screen = Screen { taken: Arc::clone(&taken), colours, shown: Buffer::empty(Rect::ZERO) };
        let told = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            // What the hook says must be readable.
            taken.give_back();
            told(panic);
        }));
        send(ENTER)?;
        Ok(screen)
    }

    /// Shows what `draw` draws into a buffer of the terminal's size. `anew`: whatever the terminal shows now.
    ///
    /// # Errors
    /// The terminal is gone, or another thread has panicked and so given it back.
    pub fn show(&mut self, anew: bool, draw: impl FnOnce(&mut Buffer)) -> io::Result<()> {
        if self.taken.is_given_back() {
            return Err(io::Error::other("a part of the program has failed"));
        }
        let (width, height) = size();
        let area = Rect::new(0, 0, width, height);
        if anew || *self.shown.area() != area {
            self.shown = Buffer::empty(area);
            send(CLEAR)?;
        }
        let mut now = Buffer::empty(area);
        draw(&mut now);
        send(&paint(&self.shown, &now, self.colours))?;
        self.shown = now;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.taken.give_back();
    }
}

fn send(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Keys as they are typed. They end with the terminal. The thread that waits for the next one ends with the program.
pub fn keys() -> mpsc::Receiver<Key> {
    let (sender, keys) = mpsc::channel(KEYS);
    thread::spawn(move || {
        let mut typed = Keys::new(Keyboard::default());
        while let Ok(Some(key)) = typed.next() {
            if sender.blocking_send(key).is_err() {
                return;
            }
        }
    });
    keys
}

/// Signals that end the program or say that the terminal has another size.
pub struct Signals {
    ends: [Signal; 3],
    resized: Signal,
}

/// What a signal says.
pub enum Told {
    End,
    Resized,
}

impl Signals {
    /// Takes signals from now on.
    pub fn take() -> io::Result<Signals> {
        let ends = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = ends.map(signal);
        Ok(Signals { ends: [interrupt?, terminate?, hangup?], resized: signal(SignalKind::window_change())? })
    }

    /// The next one.
    pub async fn next(&mut self) -> Told {
        let [interrupt, terminate, hangup] = &mut self.ends;
        tokio::select! {
            _ = interrupt.recv() => Told::End,
            _ = terminate.recv() => Told::End,
            _ = hangup.recv() => Told::End,
            _ = self.resized.recv() => Told::Resized,
        }
    }
}
