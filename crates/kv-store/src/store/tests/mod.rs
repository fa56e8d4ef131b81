mod bounds;
mod crashes;
mod disk;
mod flow;
mod groups;
mod objects;
mod rig;
