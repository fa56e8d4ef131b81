//! The effects that a shell has still to carry out.

use std::collections::VecDeque;

/// Effects that were not carried out yet, in order.
#[derive(Debug)]
pub(crate) struct Todo<E> {
    effects: VecDeque<E>,
    /// Kept to reuse its memory.
    buffer: Vec<E>,
}

impl<E> Todo<E> {
    pub fn new() -> Self {
        Todo { effects: VecDeque::new(), buffer: Vec::new() }
    }

    /// An empty buffer for the effects of one input. Give it back with [`Todo::put_first`].
    pub fn buffer(&mut self) -> Vec<E> {
        std::mem::take(&mut self.buffer)
    }

    /// Puts the effects of one input before those that are left. If some are left, the input is the answer of the effect that
    /// came before them.
    pub fn put_first(&mut self, mut said: Vec<E>) {
        while let Some(effect) = said.pop() {
            self.effects.push_front(effect);
        }
        self.buffer = said;
    }

    /// Takes the next effect.
    pub fn next(&mut self) -> Option<E> {
        self.effects.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(todo: &mut Todo<u32>, effects: &[u32]) {
        let mut said = todo.buffer();
        assert!(said.is_empty());
        said.extend(effects);
        todo.put_first(said);
    }

    #[test]
    fn effects_of_an_answer_come_before_the_rest_and_in_their_order() {
        let mut todo = Todo::new();
        feed(&mut todo, &[1, 2]);
        assert_eq!(todo.next(), Some(1));
        feed(&mut todo, &[10, 11]);
        assert_eq!(todo.next(), Some(10));
        feed(&mut todo, &[100]);
        feed(&mut todo, &[]);
        let rest: Vec<u32> = std::iter::from_fn(|| todo.next()).collect();
        assert_eq!(rest, [100, 11, 2]);
    }
}
