pub(crate) struct Keys;
